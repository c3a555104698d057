"""Random numbers as ordinary ops: a hash of the op's keys in this step and the element's index.

Such a number is the same bit for bit on a CPU and a GPU, on any number of devices, inside a fused
kernel and outside; it needs no generator, and can be computed again where it is needed.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from devplace.graph.program import KEY_WORDS, RANDOM_KEYS
from devplace.step_capture.analysis import is_random, tensors_in

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten

_SECOND = 0x6C8E9CF5  # any constant; gives the bits that a float64 has beyond 32
_RATE_BITS = 24  # of the numbers that rates are compared with
# Binary digits of a significand: numbers k / 2**digits below 1 are exact.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def draw_by_counter(graph: torch.fx.Graph) -> bool:
    """Replace random ops by plain ops that compute the same distribution from a counter.

    Of element `i`, in the order of a contiguous tensor, of the op that draws at position `k`, the
    32 random bits are `mix(mix(i ^ keys[k, 0]) ^ keys[k, 1])` in wrapping int32, where
    `mix` is the finaliser of MurmurHash3 (Appleby, 2011, https://github.com/aappleby/smhasher).
    Keys are the graph's last placeholder, so ops that draw alike are equal but for what they read.

    Replaced are `bernoulli`, `native_dropout`, `rand`, `rand_like` and `uniform`. Rates are
    multiples of 2**-24. Other random ops keep their generators (normal numbers need a logarithm,
    which a CPU and a GPU round differently), and so do ops of about 2**31 elements or more.

    Args:
        graph: A clean graph.

    Returns:
        Whether there is such a placeholder now: `RANDOM_KEYS`, int32 `[draws, KEY_WORDS]`.
    """
    found = list(filter(is_random, graph.nodes))
    count = 1 + max((node.meta["tag"].draw for node in found), default=-1)
    drawn = list(filter(_is_drawn, found))
    if drawn:
        keys = _add_keys(graph, tensors_in(drawn[0].meta["val"])[0], count)
    values: dict[Any, Any] = {}
    for node in drawn:
        position = node.meta["tag"].draw
        with graph.inserting_before(node):
            _DRAWS[node.target](_Numbers(graph, node, position, keys, values))
    return bool(drawn)


def _is_drawn(node: Node) -> bool:
    """Whether a random op is replaced: all its indices must be int32."""
    is_small = tensors_in(node.meta["val"])[0].numel() < 2**31
    return node.target in _DRAWS and is_small and not node.kwargs.get("generator")


def _add_keys(graph: torch.fx.Graph, like: Any, count: int) -> Node:
    """The placeholder of the keys, on the device of a fake tensor."""
    last = graph.find_nodes(op="placeholder")
    first = next(iter(graph.nodes))
    place = graph.inserting_after(last[-1]) if last else graph.inserting_before(first)
    with place:
        keys = graph.placeholder(RANDOM_KEYS)
    with like.fake_mode:
        keys.meta["val"] = torch.empty(count, KEY_WORDS, dtype=torch.int32, device=like.device)
    return keys


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of a number."""
    return (value + 2**31) % 2**32 - 2**31


class _Numbers:
    """Makes the calls that stand in for one random op.

    Attributes:
        node: The random op.
        like: Fake tensor with the shape, strides, dtype and device of what it draws.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        node: Node,
        position: int,
        keys: Node,
        values: dict[Any, Any],
    ) -> None:
        self.node = node
        self.like: Any = tensors_in(node.meta["val"])[0]
        self._graph = graph
        self._position = position
        self._keys = keys
        self._values = values  # fake ones of calls on tensors that lie alike

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument of the random op."""
        args = self.node.args
        return args[index] if index < len(args) else self.node.kwargs.get(name, default)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call with the random op's tag, and with its fake value."""
        made = self._graph.call_function(target, args, kwargs)
        key = target, _layouts(args), _layouts(tuple(kwargs.items()))
        if key not in self._values:
            given = torch.fx.node.map_arg(args, lambda node: node.meta["val"])
            with self.like.fake_mode:
                self._values[key] = target(*given, **kwargs)
        made.meta.update(tag=self.node.meta["tag"], val=self._values[key])
        return made

    def replace_by(self, made: Node) -> None:
        """Put a node in the place of the random op."""
        self.node.replace_all_uses_with(made)
        self._graph.erase_node(self.node)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """The values in another dtype."""
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(aten._to_copy.default, node, dtype=dtype)

    def below(self, rate: float) -> Node:
        """Bool, true with a probability: whether 24 random bits are below `rate * 2**24`."""
        bits = self._low_bits(self._mix(self._state()), _RATE_BITS)
        return self.call(aten.lt.Scalar, bits, math.ceil(rate * 2**_RATE_BITS))

    def uniform(self, dtype: torch.dtype) -> Node:
        """Multiples of 2**-digits in `[0, 1)`, all equally likely, as many as the dtype has.

        A float64 has 26 bits from one hash and 27 from another one; their sum is exact.
        """
        digits = _DIGITS[dtype]
        state = self._state()
        high = min(digits, 26)
        number = self._scaled(self._low_bits(self._mix(state), high), dtype, 2.0**-high)
        if high == digits:
            return number
        other = self._mix(self.call(aten.bitwise_xor.Scalar, state, _SECOND))
        bits = self._low_bits(other, digits - high)
        return self.call(aten.add.Tensor, number, self._scaled(bits, dtype, 2.0**-digits))

    def _scaled(self, bits: Node, dtype: torch.dtype, factor: float) -> Node:
        return self.call(aten.mul.Tensor, self.cast(bits, dtype), factor)

    def _low_bits(self, node: Node, count: int) -> Node:
        return self.call(aten.bitwise_and.Scalar, node, (1 << count) - 1)

    def _state(self) -> Node:
        """What is mixed a last time."""
        row = self.call(aten.select.int, self._keys, 0, self._position)
        key0, key1 = (self.call(aten.select.int, row, 0, word) for word in range(2))
        inner = self._mix(self.call(aten.bitwise_xor.Tensor, self._index(), key0))
        return self.call(aten.bitwise_xor.Tensor, inner, key1)

    def _index(self) -> Node:
        """Each element's index, int32, laid out as what is drawn."""
        like = self.like
        index = self.call(
            aten.arange.start,
            0,
            like.numel(),
            dtype=torch.int32,
            device=like.device,
            pin_memory=False,
        )
        if like.dim() != 1:
            index = self.call(aten.view.default, index, list(like.shape))
        dense = torch.empty_like(like)
        if dense.is_contiguous():
            return index
        order = sorted(range(like.dim()), key=lambda dim: -dense.stride(dim))
        index = self.call(aten.permute.default, index, order)
        index = self.call(aten.clone.default, index, memory_format=torch.contiguous_format)
        back = [order.index(dim) for dim in range(like.dim())]
        return self.call(aten.permute.default, index, back)

    def _mix(self, node: Node) -> Node:
        """MurmurHash3's fmix32 of an int32 node."""
        node = self.call(aten.mul.Tensor, self._xor_shift(node, 16), _signed(0x85EBCA6B))
        node = self.call(aten.mul.Tensor, self._xor_shift(node, 13), _signed(0xC2B2AE35))
        return self._xor_shift(node, 16)

    def _xor_shift(self, node: Node, count: int) -> Node:
        """`x ^ (x >>> count)`; int32 shifts copy the sign, so the copies are masked away."""
        shifted = self.call(aten.bitwise_right_shift.Tensor_Scalar, node, count)
        return self.call(aten.bitwise_xor.Tensor, node, self._low_bits(shifted, 32 - count))


def _layouts(args: Any) -> Any:
    """Arguments with shape, strides and dtype in place of nodes, hashable."""
    if isinstance(args, torch.fx.Node):
        value = args.meta["val"]
        return tuple(value.shape), tuple(value.stride()), value.dtype
    if isinstance(args, (list, tuple)):
        return tuple(map(_layouts, args))
    return type(args), args


def _bernoulli_rate(numbers: _Numbers) -> None:
    rate = numbers.argument(1, "p")
    if 0 <= rate <= 1:
        numbers.replace_by(numbers.cast(numbers.below(rate), numbers.like.dtype))


def _bernoulli(numbers: _Numbers) -> None:
    """Rates that are a tensor: the op's own input, or a second one."""
    rates = numbers.argument(1, "p", numbers.node.args[0])
    is_one = numbers.call(aten.lt.Tensor, numbers.uniform(torch.float32), rates)
    numbers.replace_by(numbers.cast(is_one, numbers.like.dtype))


def _dropout(numbers: _Numbers) -> None:
    """As the kernel: kept inputs times `1 / (1 - p)`, and which are kept."""
    rate = numbers.argument(1, "p")
    mask = numbers.below(1 - rate)
    kept = numbers.call(aten.mul.Tensor, numbers.node.args[0], mask)
    out = numbers.call(aten.mul.Tensor, kept, 0.0 if rate == 1 else 1 / (1 - rate))
    for user in list(numbers.node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((out, mask)[user.args[1]])
        user.graph.erase_node(user)
    numbers.node.graph.erase_node(numbers.node)


def _rand(numbers: _Numbers) -> None:
    if numbers.like.dtype in _DIGITS:
        numbers.replace_by(numbers.uniform(numbers.like.dtype))


def _uniform(numbers: _Numbers) -> None:
    """`low + (high - low) * u` with 24 bits of `u`; float64, which would need more, stays.

    Product and sum are in float64: the product is exact, so a compiler that fuses both rounds as
    one that does not.
    """
    if numbers.like.dtype not in _DIGITS or numbers.like.dtype == torch.float64:
        return
    low, high = (_as_float32(numbers.argument(k, n, k - 1.0)) for k, n in ((1, "from"), (2, "to")))
    wide = numbers.cast(numbers.uniform(torch.float32), torch.float64)
    scaled = numbers.call(aten.mul.Tensor, wide, _as_float32(high - low))
    moved = numbers.call(aten.add.Tensor, scaled, low)
    numbers.replace_by(numbers.cast(moved, numbers.like.dtype))


def _as_float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


_DRAWS: dict[Any, Callable[[_Numbers], None]] = {
    aten.bernoulli.p: _bernoulli_rate,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.native_dropout.default: _dropout,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.uniform.default: _uniform,
}
