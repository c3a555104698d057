"""The compiled kernels of groups."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.groups import Compiler, X, double, group, in_a_new_process

from devplace.graph.fusion.call import FusedCall
from devplace.kernels import fused, kernel_of
from devplace.kernels.fused import FusedKernel, failures, kernel_of_call
from devplace.kernels.kernel_signature import place_of, signature_of
from devplace.kernels.store import KernelStore

pytestmark = pytest.mark.usefixtures("no_kernels_yet")
Patch = pytest.MonkeyPatch


@pytest.fixture
def empty(monkeypatch: Patch, tmp_path: Path) -> None:
    """Nothing is on disk."""
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path))


@pytest.mark.usefixtures("empty")
def test_a_group_is_compiled_once_for_each_layout(monkeypatch: Patch) -> None:
    """In this process and in later ones; groups that compute the same share a kernel."""
    compiler = Compiler(monkeypatch)
    call = group(double, X)
    kernel = kernel_of(call, "cpu")
    assert kernel is kernel_of_call(group(double, X))
    for _ in range(2):
        assert torch.equal(kernel(X), X)  # as the stand-in computes it
        kernel(X.view(2, 3))
        kernel(X.double())
        kernel(torch.zeros(7)[1:])
    assert len(compiler.calls) == 4
    in_a_new_process(monkeypatch)
    assert torch.equal(kernel_of_call(call)(X), X)
    assert len(compiler.calls) == 4
    assert failures() == {}


@pytest.mark.usefixtures("empty")
def test_what_the_compiler_refuses_runs_one_by_one(monkeypatch: Patch) -> None:
    """It is said why, and not tried again: not in this process, nor in a later one."""
    compiler = Compiler(monkeypatch, refuses=True)
    call = group(double, X)
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(kernel_of_call(call)(X), X * 2)
        assert failures() == {call.name: "too hard"}
        assert compiler.calls == [call.name]
        in_a_new_process(monkeypatch)


@pytest.mark.usefixtures("empty")
def test_a_kernel_that_cannot_be_loaded_runs_one_by_one(monkeypatch: Patch) -> None:
    """Its source fails when it is run."""
    Compiler(monkeypatch, source="raise OSError('no such library')\n")
    call = group(double, X)
    assert torch.equal(kernel_of_call(call)(X), X * 2)
    assert failures() == {call.name: "OSError: no such library"}


@pytest.mark.usefixtures("empty")
def test_a_kernel_that_crashed_is_not_loaded(monkeypatch: Patch) -> None:
    """Where a compiling process wrote the source, and then died trying it."""
    compiler = Compiler(monkeypatch)
    call = group(double, X)
    signature = signature_of(call, "cpu", [X])
    store = KernelStore(place_of("cpu"))
    store.write(signature.key, compiler.source)
    store.write_failure(signature.key, "the compiler crashed")
    assert torch.equal(kernel_of_call(call)(X), X * 2)
    assert failures() == {call.name: "the compiler crashed"}
    assert compiler.calls == []


@pytest.mark.usefixtures("one_by_one", "empty")
def test_compiling_can_be_switched_off(monkeypatch: Patch) -> None:
    """Nothing is compiled, nor taken from disk."""
    compiler = Compiler(monkeypatch)
    call = group(double, X)
    store = KernelStore(place_of("cpu"))
    store.write(signature_of(call, "cpu", [X]).key, compiler.source)
    assert torch.equal(kernel_of_call(call)(X), X * 2)
    assert compiler.calls == []
    assert "DEVPLACE_COMPILE=0" in failures()[call.name]


@pytest.mark.usefixtures("empty")
def test_what_cannot_be_kept_is_compiled_again(monkeypatch: Patch, tmp_path: Path) -> None:
    """A cache that cannot be written costs time, no more."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path / "file"))
    compiler = Compiler(monkeypatch)
    call = group(double, X)
    for _ in range(2):
        assert torch.equal(kernel_of_call(call)(X), X)
        in_a_new_process(monkeypatch)
    assert len(compiler.calls) == 2


def updated(old: Any, grad: Any) -> Any:
    """A new value that reads the old one in another order, and what else reads the old one."""
    return old + 1, old.flip(0) * 0.5 + grad, old.sum(), old.flip(0) - grad


def writing(call: FusedCall, device: Any, tensors: Any) -> Any:
    """A signature as on a GPU."""
    return signature_of(call, device, tensors)._replace(writes=call.over)


@pytest.mark.parametrize("way", ["one by one", "by a kernel that does not", "by one that does"])
def test_a_kernel_writes_over_an_input(monkeypatch: Patch, way: str) -> None:
    """Into its memory where that is asked for, and nowhere else; everything that reads the old
    value sees it whole, whatever the order."""
    if way == "one by one":
        monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    if way == "by one that does":
        monkeypatch.setattr(fused, "signature_of", writing)
    old, grad = torch.arange(64.0), torch.arange(64.0) * 3
    kernel = FusedKernel(group(updated, old, grad, over=((1, 0),)))
    expected = [old + 1, (63 - old) * 0.5 + grad, torch.tensor(2016.0), (63 - old) - grad]
    place = old.data_ptr()
    assert all(map(torch.equal, kernel(old, grad), expected))
    assert torch.equal(old, torch.arange(64.0))
    made = kernel.in_place(old, grad)
    assert (failures() == {}) == (way != "one by one")
    assert made[1] is old
    assert old.data_ptr() == place
    assert all(map(torch.equal, made, expected))
    assert torch.equal(grad, torch.arange(64.0) * 3)


def test_a_compiled_group_gives_what_its_members_give() -> None:
    """Several outputs, constants, views of odd layouts, a scalar of another type."""

    def function(x: Any, rate: Any) -> Any:
        scaled = (x * rate + torch.full((), 0.5)).to(torch.float32)
        return scaled.exp().sum(0), scaled.t(), scaled > 0.25

    x, rate = torch.linspace(-1, 1, 24).view(4, 6).t(), torch.tensor(0.5, dtype=torch.float64)
    call = group(function, x, rate)
    one_by_one, compiled = call(x, rate), FusedKernel(call)(x, rate)
    assert failures() == {}
    for one, other in zip(one_by_one, compiled, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_calls_can_be_sent() -> None:
    """Pickled and copied ones have the same name and compute the same."""
    call = group(lambda x: (x.sum(0), x * 2), X.view(2, 3))
    for other in (pickle.loads(pickle.dumps(call)), copy.deepcopy(call)):
        assert isinstance(other, FusedCall)
        assert (other.name, other.num_outputs) == (call.name, 2)
        assert all(map(torch.equal, other(X.view(2, 3)), call(X.view(2, 3))))


def test_names_of_calls_say_what_is_computed() -> None:
    """Equal graphs have equal names, whatever their inputs are called; others have others."""

    def named(first: Any, second: Any) -> Any:
        return (first * 2 + second,)

    functions = [
        lambda a, b: (a * 2 + b,),
        lambda a, b: (a * 3 + b,),
        lambda a, b: (b * 2 + a,),
        lambda a, b: (a * 2 + b, a * 2),
        lambda a, b: (a * 2 - b,),
    ]
    found = [group(function, X, X + 1).name for function in functions]
    assert group(named, X, X + 1).name == found[0]
    assert len(set(found)) == 5
