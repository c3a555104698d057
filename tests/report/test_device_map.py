"""Device maps."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.steps import chain_graph, machine, make_problem, placed, wide_graph

from devplace.errors import PlanError, PlanMismatchError
from devplace.plan import load_plan
from devplace.report import device_map
from devplace.report.device_map import collapse, user_names

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
def test_map_covers_every_parameter_once_with_its_device(held: dict[str, str]) -> None:
    """Exactly one path covers each parameter, it says its device, and no two could be merged."""
    found = collapse(held)
    for name, device in held.items():
        assert [found[path] for path in found if covers(path, name)] == [device]
    for path in filter(None, found):
        above = path.rpartition(".")[0]
        assert len({d for name, d in held.items() if covers(above, name)}) > 1
    assert all(any(covers(path, name) for name in held) for path in found)


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
    problem = dp.Problem(graph, described, dp.Analytic()(graph, described), pins={"mid": "cuda:1"})
    found = device_map(dp.place(problem, dp.placers.Random(), "5ev").plan)
    for name in model.state_dict():
        assert sum(covers(path, name) for path in found) == 1
    assert found.get("head", found.get("")) == found.get("tok", found.get(""))
