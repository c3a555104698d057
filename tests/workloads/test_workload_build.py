"""Built-in workloads: they build, train, have the published sizes, and repeat by seed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from devplace import workloads
from devplace.errors import InputError

# Millions of parameters. The vision and transformer figures are those of the papers or released
# models (torchvision, of ViT too; BERT without its pooler, with the masked-word head); the others
# follow from the formulas in `test_recurrent_and_expert_parameters_follow_from_their_sizes`.
PARAMETERS_M = {
    "inception-v3": 27.16,
    "resnet-50": 25.56,
    "resnet-152": 60.19,
    "rnnlm": 108.11,
    "nmt-2": 140.31,
    "nmt-4": 173.90,
    "nmt-8": 241.07,
    "gnmt-4": 229.74,
    "bert-base": 109.5,
    "bert-large": 335.2,
    "gpt-2": 124.4,
    "llama": 219.73,
    "vit-b-16": 86.57,
    "moe": 104.28,
}
FULL_BATCH = {"inception-v3": 32, "resnet-50": 32, "resnet-152": 32, "rnnlm": 64, "nmt-8": 64}


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters of a model; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def same(first: workloads.Workload, second: workloads.Workload) -> bool:
    """Whether weights and inputs of two workloads are equal to the bit."""
    pairs = list(zip(first.inputs, second.inputs, strict=True))
    pairs += zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def test_names_and_descriptions_need_no_torch() -> None:
    """Importing the room, listing it and meeting an unknown name leave torch unimported."""
    code = (
        "import sys\n"
        "from devplace import workloads, errors\n"
        "texts = [workloads.describe(name) for name in workloads.NAMES]\n"
        "try: workloads.build('nmt-3')\n"
        "except errors.InputError: pass\n"
        "try: workloads.resolve('none.py:build')\n"
        "except errors.InputError: pass\n"
        "assert all(texts) and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_has_one_line() -> None:
    """All workloads are named, each with a description of one line."""
    assert set(workloads.NAMES) == set(PARAMETERS_M)
    for name in workloads.NAMES:
        assert "\n" not in workloads.describe(name)


@pytest.mark.parametrize("name", workloads.NAMES)
def test_full_size_has_the_published_parameters(name: str) -> None:
    """At full size the parameter count is within 1 % of the published one, without memory."""
    workload = workloads.build(name)
    assert num_parameters(workload.model) / 1e6 == pytest.approx(PARAMETERS_M[name], rel=0.01)
    assert all(tensor.is_meta for tensor in [*workload.inputs, *workload.model.parameters()])
    assert workload.inputs[0].shape[0] == FULL_BATCH.get(name, workload.inputs[0].shape[0])


def lstm(inputs: int, hidden: int) -> int:
    """Parameters of a torch LSTM cell: four gates, two biases."""
    return 4 * hidden * (inputs + hidden + 2)


def test_recurrent_and_expert_parameters_follow_from_their_sizes() -> None:
    """Layers, embeddings, attention, experts and output layers add up to the exact counts."""
    h, v = 2048, 10_000
    assert num_parameters(workloads.build("rnnlm").model) == 2 * v * h + v + 2 * lstm(h, h)
    h, v = 1024, 32_000
    attention, words = 2 * h * h + h, 2 * v * h
    for layers in (2, 4, 8):
        cells = (2 * layers - 1) * lstm(h, h) + lstm(2 * h, h)
        expected = words + cells + attention + 2 * h * h + (h + 1) * v
        assert num_parameters(workloads.build(f"nmt-{layers}").model) == expected
    cells = 4 * lstm(h, h) + 5 * lstm(
        2 * h, h
    )  # wide: the second of the encoder, all of the decoder
    expected = words + cells + attention + (2 * h + 1) * v
    assert num_parameters(workloads.build("gnmt-4").model) == expected
    d, f, v = 1024, 2816, 32_000
    block = 4 * d * d + 3 * d * f + 2 * d
    assert num_parameters(workloads.build("llama").model) == 2 * v * d + 12 * block + d
    d, f, v = 512, 2048, 32_000
    expert = d * f + f + f * d + d
    block = 4 * (d * d + d) + 4 * d + 8 * d + 8 * expert
    assert num_parameters(workloads.build("moe").model) == v * d + 128 * d + 4 * block + (d + 1) * v


@pytest.mark.parametrize("name", workloads.NAMES)
def test_small_step_runs_in_float64(name: str) -> None:
    """Forward and backward of the small size give a finite loss and every gradient."""
    workload = workloads.build(name, "small", device="cpu")
    assert workload.model.training
    model = workload.model.double()
    inputs = [x.double() if x.is_floating_point() else x for x in workload.inputs]
    loss = workload.loss_fn(model, *inputs)
    loss.backward()
    assert loss.dtype == torch.float64
    assert loss.shape == ()
    assert torch.isfinite(loss)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("name", workloads.NAMES)
def test_small_micro_batches_run(name: str) -> None:
    """The small batch is 4 in every input, and half of it makes a step too."""
    workload = workloads.build(name, "small", device="cpu")
    assert {x.shape[0] for x in workload.inputs} == {4}
    half = [x[2:] for x in workload.inputs]
    assert torch.isfinite(workload.loss_fn(workload.model, *half))


@pytest.mark.parametrize("name", workloads.NAMES)
def test_small_has_the_modules_of_full(name: str) -> None:
    """The small size has the same modules and parameters by name, only smaller."""
    full = workloads.build(name)
    small = workloads.build(name, "small")
    assert [key for key, _ in small.model.named_parameters()] == [
        key for key, _ in full.model.named_parameters()
    ]
    assert num_parameters(small.model) < 300_000
    assert [x.dtype for x in small.inputs] == [x.dtype for x in full.inputs]


@pytest.mark.parametrize("name", workloads.NAMES)
def test_seed_decides_weights_and_inputs(name: str) -> None:
    """The same seed gives the same bits, another seed others."""
    first = workloads.build(name, "small", device="cpu", seed=3)
    assert same(first, workloads.build(name, "small", device="cpu", seed=3))
    assert not same(first, workloads.build(name, "small", device="cpu", seed=4))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_global_random_state_is_untouched(device: str) -> None:
    """Building draws nothing from the caller's generator."""
    before = torch.get_rng_state()
    workloads.build("bert-base", "small", device=device, seed=9)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", workloads.NAMES)
def test_batch_overrides_the_size(name: str, device: str) -> None:
    """`batch` sets the first dimension of every input and nothing else."""
    workload = workloads.build(name, "small", batch=6, device=device)
    assert {x.shape[0] for x in workload.inputs} == {6}
    assert {x.device.type for x in workload.inputs} == {device}
    usual = workloads.build(name, "small")
    assert [x.shape[1:] for x in workload.inputs] == [x.shape[1:] for x in usual.inputs]


@pytest.mark.parametrize("name", ["bert-base", "bert-large", "gpt-2"])
def test_head_is_tied_to_the_embedding(name: str) -> None:
    """The output weights are the word embedding's, on meta and on the CPU."""
    for device in ("meta", "cpu"):
        model = workloads.build(name, "small", device=device).model
        assert model.projection.weight is model.word_embedding.weight


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("inception-v3", 0.5),
        ("bert-base", 0.1),
        ("gpt-2", 0.1),
        ("vit-b-16", 0.0),
        ("rnnlm", 0.0),
        ("nmt-4", 0.0),
    ],
)
def test_dropout_is_as_published_and_can_be_set(name: str, dropout: float) -> None:
    """Dropout is on where the model is published with it, and `dropout` changes it."""
    for size in workloads.SIZES:
        rates = {m.p for m in _dropouts(workloads.build(name, size).model)}
        assert rates == {dropout}
        changed = workloads.build(name, size, dropout=0.25)
        assert {m.p for m in _dropouts(changed.model)} == {0.25}


def _dropouts(model: torch.nn.Module) -> list[torch.nn.Dropout]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]


@pytest.mark.parametrize("name", workloads.NAMES)
def test_without_dropout_a_step_repeats(name: str) -> None:
    """With dropout off, the loss is a function of weights and inputs: twice the same bits."""
    has_dropout = name not in ("resnet-50", "resnet-152", "llama")
    settings = {"dropout": 0.0} if has_dropout else {}
    workload = workloads.build(name, "small", device="cpu", **settings)
    first = workload.loss_fn(workload.model, *workload.inputs)
    assert torch.equal(first, workload.loss_fn(workload.model, *workload.inputs))


def test_settings_of_a_workload_can_be_changed() -> None:
    """Other fields of the config are keywords: fewer BERT blocks have fewer parameters."""
    twelve = workloads.build("bert-large", layers=12)
    whole = workloads.build("bert-large")
    block = sum(parameter.numel() for parameter in whole.model.blocks[0].parameters())
    assert num_parameters(whole.model) - num_parameters(twelve.model) == 12 * block


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "resnet50"}, ["Unknown workload 'resnet50'", "Did you mean 'resnet-50'?"]),
        ({"name": "nothing"}, ["Unknown workload 'nothing'", "file.py:function", "gnmt-4"]),
        ({"name": "moe", "size": "smal"}, ["Unknown size 'smal'", "Did you mean 'small'?"]),
        ({"name": "moe", "size": "huge"}, ["Unknown size 'huge'", "full or small"]),
        ({"name": "moe", "batch": 0}, ["batch must be a positive number", "got 0"]),
        ({"name": "moe", "batch": True}, ["batch must be a positive number", "got True"]),
        ({"name": "moe", "device": "gpu7"}, ["Unknown device 'gpu7'"]),
        ({"name": "moe", "layer": 2}, ["no setting 'layer'", "Did you mean 'layers'?"]),
        ({"name": "moe", "layers": "2"}, ["layers of workload moe must be of type int", "'2'"]),
        ({"name": "moe", "layers": 0}, ["layers of workload moe must be at least 1, got 0"]),
        ({"name": "moe", "experts": 1}, ["experts_per_token is 2", "1 experts"]),
        ({"name": "moe", "dropout": 1.5}, ["dropout of workload moe must be from 0", "1.5"]),
        ({"name": "gpt-2", "seq": 2000}, ["seq is 2000 tokens", "1024 positions"]),
        ({"name": "gpt-2", "heads": 5}, ["heads must divide width", "5 heads", "768"]),
        ({"name": "llama", "heads": 1024}, ["even number of features", "1024 heads"]),
        ({"name": "llama", "seq": 4000}, ["seq is 4000 tokens", "2048 positions"]),
        (
            {"name": "vit-b-16", "image": 230},
            ["patch must divide image", "16 pixels", "230 pixels"],
        ),
        ({"name": "vit-b-16", "heads": 5}, ["heads must divide width", "5 heads", "768"]),
        ({"name": "inception-v3", "image": 100}, ["image", "100 pixels", "at least 299"]),
    ],
)
def test_build_errors_name_culprit_and_way_out(
    arguments: dict[str, object], words: list[str]
) -> None:
    """A wrong argument is an InputError of one line that names it and what would be right."""
    with pytest.raises(InputError) as caught:
        workloads.build(**arguments)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_integer_serves_as_a_rate() -> None:
    """`dropout=0` is as good as `dropout=0.0`."""
    assert {m.p for m in _dropouts(workloads.build("gpt-2", "small", dropout=0).model)} == {0.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_missing_device_is_an_input_error() -> None:
    """A device that torch knows but that is not there is reported in one line."""
    with pytest.raises(InputError, match="Device cuda:0 cannot be used"):
        workloads.build("rnnlm", "small", device="cuda:0")
