"""Messages: a tensor arrives as a copy on the spot would be, bit for bit and stride for stride."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from devplace.run.copies import CACHE_LINE_BYTES, clone_tensor
from devplace.run.ranks.messages import message_bytes, pack, unpack

DTYPES = (torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.uint8)


def carried(value):
    """What the receiver gets."""
    message = pack(value)
    assert message.numel() == message_bytes(value.shape, value.dtype)
    return unpack(message, value.shape, value.dtype)


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 10**6),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_a_message_is_a_copy(shape, seed, dtype, data):
    """Whatever is sliced, turned around or repeated, values and strides are those of a copy."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randint(0, 2, [2 * side for side in shape], generator=generator).to(dtype)
    for dim, side in enumerate(shape):
        way = data.draw(st.sampled_from(["half", "every other", "one repeated", "whole"]))
        if way == "half":
            value = value.narrow(dim, side, side)
        elif way == "every other":
            value = value.index_select(dim, torch.arange(2 * side)).transpose(0, dim)
        elif way == "one repeated" and side:
            value = value.narrow(dim, 0, 1).expand(
                *(3 if d == dim else -1 for d in range(value.dim()))
            )
    expected, found = clone_tensor(value), carried(value)
    assert torch.equal(found, expected)
    sides = zip(value.shape, found.stride(), expected.stride(), strict=True)
    assert all(size == 1 or mine == theirs for size, mine, theirs in sides) or 0 in value.shape


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (1,) * 9])
def test_elements_lie_as_in_memory_of_their_own(shape):
    """Kernels choose loops by alignment, and round otherwise."""
    assert carried(torch.ones(shape)).data_ptr() % CACHE_LINE_BYTES == 0


def test_a_plain_tensor_is_not_copied_again():
    """What arrives is the memory of the message."""
    message = pack(torch.arange(6.0).view(2, 3))
    found = unpack(message, (2, 3), torch.float32)
    assert found.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()
