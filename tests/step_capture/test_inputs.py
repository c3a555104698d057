"""Inputs and outputs keep their structure: nested dicts, dataclasses, ints and None."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from tests.step_capture.checks import Runner, sgd
from torch import nn

import devplace as dp
from devplace.errors import CaptureError
from devplace.graph import Constant, OpGraph
from devplace.step_capture import capture, flatten_batch


@dataclass
class Output:
    """What a model may return."""

    loss: torch.Tensor
    logits: dict[str, torch.Tensor]
    cache: Any = None
    steps: int = 0


@dataclass(frozen=True)
class Pair:
    """A frozen input record."""

    left: torch.Tensor
    right: tuple[torch.Tensor, int]


class Model(nn.Module):
    """Takes a tensor, an int and None; returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, power: int = 1, mask: Any = None) -> Output:
        logits = self.linear(x) ** power
        return Output(logits.mean(), {"raw": logits, "double": logits * 2}, mask, power + 1)


def rebuild(graph: OpGraph, values: list[torch.Tensor]) -> Any:
    """The model's output from the results of a step."""
    program = graph.program
    leaves = [
        leaf.value if isinstance(leaf, Constant) else values[leaf] for leaf in program.output_leaves
    ]
    return pytree.tree_unflatten(leaves, program.output_spec)


def test_s38_dataclass_output_comes_back_with_its_type() -> None:
    """A batch dict with tensor, int and None; an output dataclass with loss, dict, None, int."""
    model = Model()
    batch = {"x": torch.randn(3, 4), "power": 2, "mask": None}
    graph = capture(model, batch)
    output = rebuild(graph, Runner(graph, model).step(1, batch))
    want = model(**batch)
    assert type(output) is Output
    torch.testing.assert_close(output.loss, want.loss.detach())
    torch.testing.assert_close(output.logits["double"], want.logits["double"].detach())
    assert (output.cache, output.steps) == (None, 3)
    assert [r.name for r in graph.results] == [
        "output.loss",
        "output.logits.raw",
        "output.logits.double",
    ]
    assert graph.meta["mode"] == "inference"
    assert dict(graph.program.input_constants) == {1: 2, 2: None}


def test_s38_loss_is_found_in_the_output() -> None:
    """Without loss_fn the model's own loss is trained."""
    model = Model()
    graph = capture(model, {"x": torch.randn(3, 4)}, None, sgd(model))
    assert graph.results[0].name == "loss"
    assert {r.name for r in graph.results if r.role == "parameter"} == {
        "linear.weight",
        "linear.bias",
    }


def test_dataclass_and_nested_inputs_are_flattened_by_name() -> None:
    """Frozen dataclasses, tuples and dicts are opened; names are dotted paths."""

    class Sum(nn.Module):
        def forward(self, pair: Pair, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            return pair.left + pair.right[0] * pair.right[1] + more["a"][1]

    a, b, c, d = torch.randn(4, 3).unbind(0)
    batch = (Pair(a, (b, 3)), {"a": [c, d]})
    graph = capture(Sum(), batch)
    names = [b.key for b in graph.program.bindings if b.kind == "input"]
    assert names == ["0.left", "0.right.0", "1.a.0", "1.a.1"]
    (got,) = Runner(graph, Sum()).step(1, batch)
    torch.testing.assert_close(got, a + b * 3 + d)
    assert [r.name for r in graph.results] == ["output"]


def test_keyword_inputs_come_beside_positional_ones() -> None:
    """example_kwargs are further keyword inputs; giving one twice is an error."""
    model = Model()
    x = torch.randn(3, 4)
    graph = capture(model, x, example_kwargs={"power": 3})
    values = Runner(graph, model).step(1, x, {"power": 3})
    torch.testing.assert_close(rebuild(graph, values).logits["raw"], model(x, 3).logits["raw"])
    with pytest.raises(CaptureError, match="'x' is in both"):
        capture(model, {"x": x}, example_kwargs={"x": x})


class Cache:
    """A container torch does not know."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values


def test_s43_unknown_container_says_how_to_register() -> None:
    """A user class holding two tensors, as input, names the class and the call."""

    class Reader(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.keys

    message = r"'Cache' holds tensors but is unknown to torch\. Register it: .*register_pytree_node"
    with pytest.raises(CaptureError, match=f"Inputs must be .*{message}"):
        capture(Reader(), (Cache(torch.zeros(2), torch.zeros(2)),))


class Bag(dict[str, Any]):
    """A dict of the user's."""


class Row(tuple[Any, ...]):
    """A tuple of the user's."""


@pytest.mark.parametrize(
    ("wrap", "advice"),
    [
        (lambda x: Bag(x=x), "{} dict(...) of it, or register it: "),
        (lambda x: UserDict(x=x), "{} dict(...) of it, or register it: "),
        (lambda x: Row([x]), "{} tuple(...) of it, or register it: "),
        (lambda x: {"known": x, "bag": Bag(x=x)}, "{} dict(...) of it, or register it: "),
    ],
)
def test_containers_unknown_to_torch_are_refused(wrap: Any, advice: str) -> None:
    """Of a subclass of dict or tuple: their tensors would be frozen."""

    class Same(nn.Module):
        def forward(self, x: Any) -> Any:
            return wrap(x) if isinstance(x, torch.Tensor) else x

    x = torch.zeros(2)
    for given, verb in (((wrap(x),), "Pass"), (x, "Return")):
        with pytest.raises(CaptureError, match="but is unknown to torch") as caught:
            capture(Same(), given)
        assert advice.format(verb) in str(caught.value)
    assert capture(Same(), UserDict(x=x), lambda m, x: x.sum()).meta["mode"] == "eval-loss"


def test_modules_and_iterators_are_no_inputs_or_outputs() -> None:
    """What to do instead depends on which it is."""

    class Same(nn.Module):
        def forward(self, x: Any) -> Any:
            return iter([x]) if isinstance(x, torch.Tensor) else x

    with pytest.raises(CaptureError, match=r"Inputs must be tensors, got a module of Linear"):
        capture(Same(), (nn.Linear(2, 2),))
    with pytest.raises(CaptureError, match=r"Outputs must be tensors, got a list_iterator\. Ret"):
        capture(Same(), torch.zeros(2))


@dataclass
class ItemsToo(OrderedDict[str, Any]):
    """A record whose items are its fields that are not None, as of transformers."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)
        self.count = len(self)


@pytest.mark.slow
def test_a_record_may_be_a_dict_too_and_have_more_attributes() -> None:
    """It comes back with its fields, items and other attributes, as output and as input."""

    class Same(nn.Module):
        def forward(self, x: Any) -> Any:
            is_record = isinstance(x, ItemsToo)
            return ItemsToo(None, x["logits"] * x.count if is_record else x)

    x = torch.tensor([1.0, 2.0])
    for given in (x, ItemsToo(torch.tensor(0.0), x)):
        infer = dp.parallelize(Same(), (given,), machine=1, budget="1ev", confirm=False)
        found = infer(given)
        expected = x if given is x else 2 * x
        assert type(found) is ItemsToo
        assert torch.equal(found.logits, expected)
        assert torch.equal(found["logits"], expected)
        assert (list(found), found.count, found.loss) == (["logits"], 1, None)
        infer.close()


def test_registered_container_works() -> None:
    """A class registered with torch's pytree is opened."""

    class Known(Cache):
        pass

    pytree.register_pytree_node(
        Known, lambda k: ([k.keys, k.values], None), lambda values, _: Known(*values)
    )

    class Reader(nn.Module):
        def forward(self, x: Known) -> torch.Tensor:
            return x.keys * x.values

    batch = (Known(torch.tensor([2.0]), torch.tensor([3.0])),)
    graph = capture(Reader(), batch)
    assert Runner(graph, Reader()).step(1, batch)[0].item() == 6.0


def test_flatten_batch_is_the_captured_structure() -> None:
    """A new batch of equal structure has the spec of the capture; another one has not."""
    model = Model()
    graph = capture(model, {"x": torch.randn(3, 4), "mask": None})
    assert flatten_batch({"x": torch.zeros(3, 4), "mask": None})[1] == graph.program.input_spec
    assert flatten_batch((torch.zeros(3, 4),))[1] != graph.program.input_spec


def test_torch_loss_without_positional_target_is_refused() -> None:
    """A torch loss needs the last positional input as target."""
    with pytest.raises(CaptureError, match="last positional input"):
        capture(nn.Linear(4, 2), {"input": torch.randn(3, 4)}, nn.MSELoss())


def test_output_that_is_an_input_or_parameter_is_kept() -> None:
    """Results may name a source's own tensor."""

    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return x, self.weight, x + self.weight

    model = Pass()
    graph = capture(model, torch.zeros(2))
    values = Runner(graph, model).step(1, torch.zeros(2))
    assert [v.tolist() for v in rebuild(graph, values)] == [[0, 0], [1, 1], [1, 1]]


def test_zero_size_tensors_have_zero_bytes() -> None:
    """An empty input is no error."""
    graph = capture(nn.Linear(4, 2), torch.zeros(0, 4))
    assert graph.tensors[graph.results[0].tensor].num_bytes == 0
