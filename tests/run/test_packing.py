"""Values held between steps, and receive buffers, lie in one piece of memory per device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from devplace.run.cuda.device import CudaDevice
from devplace.run.cuda.packing import Packing, num_span_bytes, shaped
from devplace.run.cuda.peer_channels import receive_buffers


class FakeGpu(CudaDevice):
    """A GPU whose memory is that of the CPU."""

    def __init__(self, source_bytes: dict[int, int]) -> None:
        self.index = 0
        self.torch_device = torch.device("cpu")
        self.buffers = {}
        self._source_bytes = source_bytes
        self._memory: Any = None

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def put(self, op: int, value: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
            patch.setattr(torch.Tensor, "is_pinned", lambda *_: True)
            self.main = None
            super().put(op, value)


VALUES = {
    1: torch.randn(3, 5),
    2: torch.tensor(7),
    3: torch.randn(4, 6).t(),
    4: torch.tensor([True, False, True]),
    5: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    6: torch.randn(9)[::2],
    7: torch.randn(5).to(torch.bfloat16),
    8: torch.randn(3, 1).expand(3, 4),
    9: torch.zeros(0, 4),
    10: torch.randn(3, dtype=torch.complex64),
}
SIZES = {op: value.numel() * value.element_size() for op, value in VALUES.items()}


def storage(value: Any) -> int:
    """Where its storage begins."""
    return int(value.untyped_storage().data_ptr())


def test_places_do_not_overlap_and_are_aligned() -> None:
    """Each tensor cut from a piece has memory of its own that begins at a multiple of 512 bytes."""
    pieces = Packing(SIZES)
    memory = torch.zeros(pieces.num_bytes, dtype=torch.uint8)
    taken: set[int] = set()
    for op, value in VALUES.items():
        like = torch.empty(value.shape, dtype=value.dtype, device="meta")
        found = pieces.cut(memory, op, like)
        if value.numel() == 0:
            assert found is None
            continue
        assert found is not None
        assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
        begin = found.data_ptr() - memory.data_ptr()
        mine = set(range(begin, begin + num_span_bytes(found)))
        assert begin % 512 == 0
        assert not mine & taken
        taken |= mine
    assert max(taken) < pieces.num_bytes == 512 * (len(VALUES) - 1)


def test_what_does_not_fit_has_no_place() -> None:
    """A tensor larger than its place, one without a place and an empty one are not cut."""
    pieces = Packing({0: 512})
    memory = torch.zeros(pieces.num_bytes, dtype=torch.uint8)
    assert pieces.cut(memory, 0, torch.empty(129)) is None
    assert pieces.cut(memory, 1, torch.empty(1)) is None
    assert pieces.cut(memory, 0, torch.empty(0)) is None
    assert pieces.cut(None, 0, torch.empty(1)) is None
    assert pieces.cut(memory, 0, torch.empty(64, dtype=torch.float64)) is not None


def test_bytes_are_seen_in_the_layout_of_another_tensor() -> None:
    """A permuted layout at an offset holds what is written to it."""
    memory = torch.zeros(1024, dtype=torch.uint8)
    like = torch.empty_strided((4, 6), (1, 4))
    found = shaped(memory[512 : 512 + num_span_bytes(like)], like)
    found.copy_(VALUES[3].t().reshape(4, 6))
    assert torch.equal(found, VALUES[3].t().reshape(4, 6))
    assert not memory[:512].any()


def test_a_device_holds_all_its_values_in_one_piece() -> None:
    """Values read back equal, lie dense in their dimension order, and share one storage."""
    device = FakeGpu(SIZES)
    for op, value in VALUES.items():
        device.put(op, value)
    assert all(torch.equal(device.buffers[op], value) for op, value in VALUES.items())
    assert device.buffers[3].stride() == (1, 6)
    assert device.buffers[5].is_contiguous(memory_format=torch.channels_last)
    assert device.buffers[6].stride() == (1,)
    assert device.buffers[8].is_contiguous()
    pieces = {storage(device.buffers[op]) for op in VALUES if op != 9}
    assert len(pieces) == 1


def test_a_value_keeps_its_address_when_it_is_put_again() -> None:
    """A graph that was captured reads the new value."""
    device = FakeGpu(SIZES)
    device.put(1, VALUES[1])
    before = device.buffers[1].data_ptr()
    device.put(1, VALUES[1] + 1)
    assert device.buffers[1].data_ptr() == before
    assert torch.equal(device.buffers[1], VALUES[1] + 1)


def test_a_value_of_another_size_gets_memory_of_its_own() -> None:
    """A value that takes more than the graph says does not run into its neighbour."""
    device = FakeGpu({1: 512, 2: 8})
    device.put(2, torch.tensor(7))
    device.put(1, torch.ones(300))
    assert storage(device.buffers[1]) != storage(device.buffers[2])
    assert device.buffers[2] == 7


def test_released_values_free_the_piece() -> None:
    """After a release nothing of the piece is held; values can be put again."""
    device = FakeGpu(SIZES)
    for op, value in VALUES.items():
        device.put(op, value)
    device.release()
    assert device.buffers == {}
    assert device._memory is None
    device.put(1, VALUES[1])
    assert torch.equal(device.buffers[1], VALUES[1])


def test_no_memory_for_the_piece_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed request raises, and the next put asks again."""
    device = FakeGpu(SIZES)
    empty = torch.empty

    def refuse(*args: Any, **options: Any) -> Any:
        if options.get("dtype") == torch.uint8:
            raise torch.OutOfMemoryError("out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        device.put(1, VALUES[1])
    monkeypatch.undo()
    assert device.buffers == {}
    device.put(1, VALUES[1])
    assert torch.equal(device.buffers[1], VALUES[1])


def test_receive_buffers_share_a_piece_and_no_memory() -> None:
    """Each has the layout of what crosses; an empty one is there too."""
    layouts = {op: value.to("meta") for op, value in VALUES.items()}
    buffers = receive_buffers(layouts, torch.device("cpu"))
    for op, like in layouts.items():
        found = buffers[op]
        assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), like.dtype)
        if found.numel():
            torch.as_strided(found, (num_span_bytes(found) // found.element_size(),), (1,)).zero_()
    begins = sorted(buffers[op].data_ptr() for op in VALUES if op != 9)
    assert all(b - a >= 512 for a, b in pairwise(begins))
    assert len({storage(buffers[op]) for op in VALUES if op != 9}) == 1
