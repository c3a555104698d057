"""Device maps of plans, tried with Accelerate on models of Transformers at small size.

The training step of each model is planned for two GPUs, at random and with modules one after the
other (`layers`). The map of each plan must

- hold nothing but names of modules, and cover the state dict: Accelerate's `check_device_map`, a
  warning of which counts as a failure;
- be taken by `dispatch_model`, and the dispatched model must run forward with nothing on the wrong
  device. There is no GPU here: tensors are fake ones of two devices, which refuse to meet as real
  ones would;
- be read back as pins (`pins_of`), after which a plan has a map that says the same of every name.

That the second check can fail is tried first: a Llama whose block is cut between attention and
feed-forward net must not run. Where the blocks of a plan follow each other, `split_points` cuts
the model for `torch.distributed.pipelining`, into as many stages as there are devices; whether
torch can export the model for that is noted.

Writes docs/results/device_maps.json and the page beside it. Run: `python
experiments/device_maps.py [--page]` with transformers and accelerate installed.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from common import RESULTS, provenance, write
from torch import nn
from zoo import hugging

import devplace as dp
from devplace.errors import PlanError
from devplace.report import device_map, pins_of, split_points

NAME = "device_maps"
SEED = 0
BUDGET = "5ev"
MODELS = (
    *("BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM"),
    *("GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM", "GPTNeoXForCausalLM"),
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM"),
    *("T5ForConditionalGeneration", "BartForConditionalGeneration"),
    *("ViTForImageClassification", "DeiTForImageClassification", "ResNetForImageClassification"),
    *("Wav2Vec2ForSequenceClassification", "HubertForSequenceClassification"),
    "MambaForCausalLM",
)
FAKE = {"cuda:0": "fake:0", "cuda:1": "fake:1"}


def plan_of(case: Any, placer: str, pins: dict[str, str] | None = None) -> dp.Plan:
    """A plan of a case's step for two cards."""
    update = torch.optim.SGD(case.model.parameters(), lr=0.1)
    graph = dp.capture(case.model, case.inputs, case.loss_fn, update)
    machine = dp.load_machine("p100x2")
    costs = dp.Analytic()(graph, machine)
    problem = dp.Problem(graph, machine, costs, pins=pins or {}, exclude=["cpu:0"])
    return dp.place(problem, dp.placers.by_name(placer), BUDGET, SEED).plan


def where(found: dict[str, str], name: str) -> str:
    """Device of a name, by the longest path."""
    paths = [path for path in found if path == "" or name.startswith(f"{path}.")]
    return found[max(paths, key=len)]


def check(model: nn.Module, found: dict[str, str]) -> None:
    """What Accelerate says of a map.

    Raises:
        ValueError, UserWarning: It does not take it.
    """
    from accelerate.utils.modeling import check_device_map

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_device_map(model, found)


def without_loss(case: Any) -> dict[str, Any]:
    """The batch without labels, which not every model moves to where its logits are."""
    inputs = {name: value for name, value in case.inputs.items() if name != "labels"}
    if getattr(case.model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = case.inputs["labels"]
    return inputs


def uncached(model: nn.Module) -> dict[str, bool]:
    """The argument that turns off caches for generation, where a model has it."""
    known = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} if known else {}


def run_dispatched(case: Any, found: dict[str, str]) -> None:
    """Dispatch the model by the map and run it once on fake tensors.

    Raises:
        Exception: Whatever the model raises where tensors of two devices meet.
    """
    from accelerate import dispatch_model
    from torch._subclasses.fake_tensor import FakeTensorMode

    _name_fake_devices()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for module in case.model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None:  # as a buffer, because Accelerate makes new parameters by class
                module._parameters.pop(name, None)
                module._buffers[name] = mode.from_tensor(value.detach())
    batch = {name: mode.from_tensor(value) for name, value in without_loss(case).items()}
    places = {path: FAKE[device] for path, device in found.items()}
    first = FAKE["cuda:0"]
    with mode, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = dispatch_model(case.model, places, main_device=first, force_hooks=True)
        model(**{name: value.to(first) for name, value in batch.items()}, **uncached(model))


@cache
def _name_fake_devices() -> None:
    """Have torch know devices `fake:0` and `fake:1`; CUDA's cannot be had without its library."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("fake")


def try_pipeline(case: Any, points: dict[str, str]) -> str:
    """Split the model with `torch.distributed.pipelining`: number of stages, or why not."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    inputs = without_loss(case) | uncached(case.model)
    spec = {path: SplitPoint.BEGINNING for path in points}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = pipeline(case.model, mb_args=(), mb_kwargs=inputs, split_spec=spec)
    except Exception as error:  # of torch.export or of what it traces: any kind
        return f"not exported: {type(error).__name__}"
    return f"{pipe.num_stages} stages"


def attempt(name: str, placer: str) -> dict[str, Any]:
    """One model and one placer."""
    make = hugging.cases()[name]
    torch.manual_seed(SEED)
    case = make()
    plan = plan_of(case, placer)
    names = list(case.model.state_dict())
    found = device_map(plan, names=names)
    row: dict[str, Any] = {"model": name, "placer": placer, "entries": len(found)}
    row["devices"] = len(set(found.values()))
    check(case.model, found)
    again = device_map(plan_of(make(), placer, pins_of(found)), names=names)
    row["read_back"] = all(where(found, n) == where(again, n) for n in names)
    try:
        points = split_points(plan)
        row["split_points"] = list(points)
        row["pipeline"] = try_pipeline(make(), points) if points else "one stage"
    except PlanError:
        row["pipeline"] = "a device comes back"
    run_dispatched(case, found)
    return row


def cut_block_fails() -> bool:
    """Whether the fake tensors notice a block that is cut."""
    case = hugging.cases()["LlamaForCausalLM"]()
    whole = ("embed_tokens", "layers.0", "norm", "rotary_emb", "layers.1.input_layernorm")
    cut = dict.fromkeys((f"model.{name}" for name in whole), "cuda:0") | {"lm_head": "cuda:0"}
    rest = ("self_attn", "post_attention_layernorm", "mlp")
    cut |= dict.fromkeys((f"model.layers.1.{name}" for name in rest), "cuda:1")
    try:
        run_dispatched(case, cut)
    except RuntimeError as error:
        return "device" in str(error)
    return False


def measure() -> dict[str, Any]:
    """Every model with both placers."""
    made, noticed, rows = provenance(), cut_block_fails(), []
    for name in MODELS:
        for placer in ("random", "layers"):
            try:
                row = attempt(name, placer)
            except Exception as error:  # a failure is a row: of Accelerate, of the model, of ours
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                row = {"model": name, "placer": placer, "failed": reason}
            rows.append(row)
            print(row, flush=True)
    packages = {name: version(name) for name in ("transformers", "accelerate")}
    return {"provenance": made, **packages, "seed": SEED, "cut_noticed": noticed, "rows": rows}


def page(data: dict[str, Any]) -> str:
    """The page of a result."""
    rows, made = data["rows"], data["provenance"]
    taken = [row for row in rows if "failed" not in row and row["read_back"]]
    models = len({row["model"] for row in rows})
    control = "is noticed" if data["cut_noticed"] else "is NOT noticed"
    lines = [
        "# Device maps that are accepted",
        "",
        "<!-- made by experiments/device_maps.py -->",
        "",
        f"{models} models of Transformers at small size, each planned for two GPUs at random and"
        f" with the placer `layers`. {len(taken)} of {len(rows)} maps pass all of it: Accelerate's"
        " `check_device_map` without a warning, `dispatch_model` with a forward pass in which"
        " nothing is on the wrong device (fake tensors of two devices; a block that is cut"
        f" {control}), and, read back as pins, a plan with the same device for every name."
        " BART has a bias of its own beside its layers, so no map of modules can part it."
        " Pipeline: what `torch.distributed.pipelining` makes of the plan's split points.",
        "",
        "| model | placer | entries | devices | result | pipeline |",
        "|---|---|--:|--:|---|---|",
    ]
    for row in rows:
        result = row.get("failed") or ("accepted" if row["read_back"] else "read back otherwise")
        lines.append(
            f"| {row['model']} | {row['placer']} | {row.get('entries', '')} "
            f"| {row.get('devices', '')} | {result} | {row.get('pipeline', '')} |"
        )
    lines += [
        "",
        f"devplace {made['devplace']}, commit {made['commit']}, torch {made['torch']}, transformers"
        f" {data['transformers']}, accelerate {data['accelerate']}, seed {data['seed']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try every model, write result and page."""
    if "--page" not in sys.argv[1:]:
        write(NAME, measure())
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    (RESULTS / f"{NAME}.md").write_text(page(data))


if __name__ == "__main__":
    main()
