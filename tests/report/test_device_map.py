"""Device maps."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.steps import chain_graph, machine, make_problem, placed, wide_graph

from devplace.errors import InputError, PlanError, PlanMismatchError
from devplace.plan import load_plan
from devplace.report import device_map, pins_of, run_elsewhere, split_points
from devplace.report.device_map import Held, collapse, module_paths, user_names

parts = st.sampled_from("abc")
names = st.lists(parts, min_size=0, max_size=3).map(".".join)
held = st.dictionaries(
    st.tuples(names, st.integers(0, 3)).map(lambda n: f"{n[0]}.w{n[1]}".lstrip(".")),
    st.sampled_from(["cuda:0", "cuda:1", "cpu"]),
    min_size=1,
    max_size=20,
)


def covers(path: str, name: str) -> bool:
    """Whether a path of the map stands for a parameter, as Accelerate reads it."""
    return path == "" or name == path or name.startswith(path + ".")


@given(held)
def test_map_covers_every_parameter_once(held: dict[str, str]) -> None:
    """Exactly one path covers each parameter, all are modules, none could be merged with another,
    and modules that no block keeps whole are where they were."""
    found = collapse({name: Held(device) for name, device in held.items()})
    modules = {path for name in held for path in module_paths(name)}
    for name, device in held.items():
        (path,) = [path for path in found if covers(path, name)]
        module = name.rpartition(".")[0]
        alone = all(other.rpartition(".")[0] != module for other in held if other != name)
        nested = any(n != name and covers(n.rpartition(".")[0], name) for n in held)
        if alone and not nested and not any(covers(module, n) for n in held if n != name):
            assert found[path] == device
    assert set(found) <= modules
    for path in filter(None, found):
        above = path.rpartition(".")[0]
        assert len({d for p, d in found.items() if covers(above, p) or p == above}) > 1


def test_blocks_go_whole_where_most_of_their_bytes_are() -> None:
    """A module of a list and one with parameters of its own are not cut."""
    held = {
        "embed.cls": Held("cuda:0", 4),
        "embed.patch.weight": Held("cuda:1", 100),
        "layers.0.attention.weight": Held("cuda:0", 30),
        "layers.0.mlp.weight": Held("cuda:1", 20),
        "layers.1.attention.weight": Held("cuda:1", 30),
        "layers.1.mlp.weight": Held("cuda:1", 20),
        "head.weight": Held("cuda:0", 9),
    }
    assert collapse(held) == {
        "embed": "cuda:1",
        "layers.0": "cuda:0",
        "layers.1": "cuda:1",
        "head": "cuda:0",
    }


def test_names_the_step_does_not_use_are_covered() -> None:
    """They go where most of the nearest module above them is."""
    held = {"bert.layer.0.w": Held("cuda:0", 3), "bert.layer.1.w": Held("cuda:1", 5)}
    names = [*held, "bert.pooler.dense.weight", "bert.layer.0.extra.bias"]
    found = collapse(held, names)
    assert found["bert.pooler"] == "cuda:1"
    assert [found[path] for path in found if covers(path, names[-1])] == ["cuda:0"]
    assert all(sum(covers(path, name) for path in found) == 1 for name in names)


def test_pins_of_a_map_put_the_weights_back() -> None:
    """What accelerate writes is read: numbers of GPUs, `cpu`, `""`; inner paths come first."""
    found = pins_of({"": 0, "a": "cpu", "a.b": "cuda:1"})
    assert list(found.items()) == [("a.b", "cuda:1"), ("a", "cpu:0"), ("*", "cuda:0")]
    problem = make_problem(chain_graph(3), machine(2))
    mapped = {"layer0": "cuda:0", "layer1": "cuda:1", "layer2": "cuda:0"}
    again = make_problem(chain_graph(3), machine(2), pins=pins_of(mapped))
    assert device_map(placed(again, mapped).timeline) == mapped
    assert problem.graph == again.graph


@pytest.mark.parametrize("bad", [{"a": "disk"}, {"a": -1}, {"a": True}, {"a": None}, {}, [], "x"])
def test_what_is_no_device_map_is_refused(bad: object) -> None:
    """Also a map that leaves weights on disk."""
    with pytest.raises(InputError, match="device"):
        pins_of(bad)


def test_what_a_plan_runs_where_its_map_does_not_say_is_told() -> None:
    """`f1` alone is on the other GPU: its module is named once, and no other."""
    problem = make_problem(chain_graph(3), machine(2))
    timeline = placed(problem, {"f1": "cuda:0"}, "cuda:1").timeline
    assert device_map(timeline) == {"": "cuda:1"}
    assert run_elsewhere(timeline, device_map(timeline)) == ("layer1",)
    whole = placed(problem, {"layer1": "cuda:0"}, "cuda:1").timeline
    assert run_elsewhere(whole, device_map(whole)) == ()


def test_split_points_are_where_the_next_device_begins() -> None:
    """The first stage begins with the model; a device that comes back is no stage."""
    problem = make_problem(chain_graph(4), machine(2))
    halves = {"layer0": "cuda:0", "layer1": "cuda:0", "layer2": "cuda:1", "layer3": "cuda:1"}
    assert split_points(placed(problem, halves).plan) == {"layer2": "cuda:1"}
    back = halves | {"layer3": "cuda:0"}
    with pytest.raises(PlanError, match="'layer3' is on cuda:0 again after cuda:1"):
        split_points(placed(problem, back).plan)


@pytest.mark.slow
def test_accelerate_takes_the_map_of_a_transformers_model() -> None:
    """Without a warning: all keys are modules, and every name of a tied weight is covered."""
    accelerate, transformers = (pytest.importorskip(n) for n in ("accelerate", "transformers"))
    import torch

    import devplace as dp

    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(50, (2, 8))
    update = torch.optim.SGD(model.parameters())
    graph = dp.capture(model, {"input_ids": ids, "labels": ids}, None, update)
    described = dp.load_machine("p100x2")
    pins = {"transformer.h.1": "cuda:1", "transformer.h.0": "cuda:0"}
    problem = dp.Problem(graph, described, dp.Analytic()(graph, described), pins=pins)
    plan = dp.place(problem, dp.placers.Random(), "5ev").plan
    found = device_map(plan, names=model.state_dict())
    assert (found["transformer.h.0"], found["transformer.h.1"]) == ("cuda:0", "cuda:1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerate.utils.modeling.check_device_map(model, found)


def test_whole_model_on_one_device_is_one_entry() -> None:
    """Everything on one device collapses to the empty path, also without parameters."""
    assert device_map(placed(make_problem(chain_graph(3), machine(2))).timeline) == {"": "cuda:1"}
    assert device_map(placed(make_problem(wide_graph(2), machine(2))).plan) == {"": "cuda:1"}


def test_modules_on_several_devices_go_down() -> None:
    """Layers on different devices are listed one by one, in model order."""
    problem = make_problem(chain_graph(3), machine(1, with_cpu=True))
    result = placed(problem, {"layer1": "cpu:0"})
    expected = {"layer0": "cuda:0", "layer1": "cpu", "layer2": "cuda:0"}
    assert device_map(result.timeline) == device_map(result.plan) == expected


def test_a_plan_from_a_file_needs_its_graph(tmp_path: Path) -> None:
    """Without the graph, or with another one, the error says what to do."""
    result = placed(make_problem(chain_graph(2), machine(2)), {"layer0": "cuda:0"})
    result.plan.save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="pass the graph"):
        device_map(plan)
    with pytest.raises(PlanMismatchError, match="another model"):
        device_map(plan, chain_graph(3))
    assert device_map(plan, chain_graph(2)) == {"layer0": "cuda:0", "layer1": "cuda:1"}


def test_the_only_cpu_is_called_cpu() -> None:
    """One CPU is `cpu`; several keep their numbers."""
    assert user_names(["cpu:0", "cuda:0"]) == ["cpu", "cuda:0"]
    assert user_names(["cpu:0", "cpu:1"]) == ["cpu:0", "cpu:1"]


def test_tied_parameters_are_listed_under_all_their_names() -> None:
    """Loaders want a device for every name of a tied weight: that of the weight."""
    import torch
    from torch import nn

    import devplace as dp

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.mid = nn.Embedding(50, 32), nn.Linear(32, 32)
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.tok.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.mid(self.tok(x))).sum()

    model = Tied()
    graph = dp.capture(model, torch.randint(50, (8, 12)), None, torch.optim.SGD(model.parameters()))
    described = dp.load_machine("p100x2")
    pins = {"tok": "cuda:0", "mid": "cuda:1"}
    problem = dp.Problem(graph, described, dp.Analytic()(graph, described), pins=pins)
    plan = dp.place(problem, dp.placers.Random(), "5ev").plan
    found = device_map(plan)
    with pytest.raises(PlanError, match=r"'tok.weight', .* give 'head.weight' a weight of"):
        split_points(plan)
    for name in model.state_dict():
        assert sum(covers(path, name) for path in found) == 1
    assert found.get("head", found.get("")) == found.get("tok", found.get(""))
