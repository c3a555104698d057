"""What kernels are made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.groups import double, group
from torch._subclasses.fake_tensor import FakeTensorMode

from devplace.graph.fusion.call import FusedCall
from devplace.kernels.kernel_signature import Layout, layout_of, signature_of

X = torch.zeros(4, 6)
DOUBLE = group(double, X)


def key(*tensors: Any, call: FusedCall = DOUBLE, device: str = "cpu") -> str:
    """Key of a call with these tensors."""
    return signature_of(call, device, tensors).key


def test_whatever_a_kernel_depends_on_makes_another_key() -> None:
    """Shape, strides, dtype, alignment, order, number of inputs; call, device, what is written."""
    keys = [
        key(X),
        key(torch.zeros(6, 4)),
        key(torch.zeros(6, 4).t()),
        key(X.double()),
        key(torch.zeros(25)[1:].view(4, 6)),
        key(X, X),
        key(X, torch.zeros(6)),
        key(torch.zeros(6), X),
        key(X, call=group(lambda x: (x * 3,), X)),
        key(X, device="cuda:0"),
        key(X, call=group(double, X, over=((0, 0),))),
        key(X, call=group(double, X, over=((1, 0),))),
        key(X, call=group(double, X, over=((0, 0),)), device="cuda:0"),
    ]
    assert len(set(keys)) == len(keys)


def test_what_it_does_not_depend_on_makes_no_other_key() -> None:
    """Values, the tensor itself, and where it lies as long as that is aligned."""
    assert key(X) == key(torch.ones(4, 6)) == key(torch.zeros(28)[4:].view(4, 6))
    assert key(X) == key(X.requires_grad_())
    assert signature_of(DOUBLE, torch.device("cpu"), [X]) == signature_of(DOUBLE, "cpu", [X])


def test_only_on_gpus_kernels_write() -> None:
    """There all of a group do, so that it has one kernel for a layout."""
    call = group(double, X, over=((0, 0),))
    assert signature_of(call, "cuda:1", [X]).writes == ((0, 0),)
    assert signature_of(call, "cpu", [X]).writes == ()


def test_where_one_element_lies_does_not_matter() -> None:
    """A kernel that reads one of several keys serves for all of them."""
    keys = torch.zeros(8, dtype=torch.int32)
    assert len({key(X, keys[k]) for k in range(8)}) == 1
    assert key(keys[:1]) == key(keys[1:2]) != key(keys[:4])


@pytest.mark.parametrize(("offset", "is_aligned"), [(0, True), (1, False), (4, True), (6, False)])
def test_alignment_counts_in_bytes_and_fake_tensors_have_it(offset: int, is_aligned: bool) -> None:
    """Of float32 every fourth element is at a multiple of 16 bytes, of float64 every second."""
    expected = Layout((5,), (1,), "float32", is_aligned)
    assert layout_of(torch.zeros(16)[offset : offset + 5]) == expected
    with FakeTensorMode():
        fake = torch.zeros(16)[offset : offset + 5]
        wide = torch.zeros(16, dtype=torch.float64)[offset : offset + 5]
    assert layout_of(fake) == expected
    assert layout_of(wide).is_aligned == (offset % 2 == 0)
