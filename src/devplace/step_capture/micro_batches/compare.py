"""Evaluate two graphs of a step on the same values and compare the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule

from devplace.device_kinds import is_host
from devplace.step_capture.analysis import results
from devplace.step_capture.micro_batches.double_precision import (
    NotEvaluatedError,
    evaluate,
    why_too_large,
)
from devplace.step_capture.request import CaptureRequest
from devplace.step_capture.step import TracedStep

Node: TypeAlias = torch.fx.Node
EXACT, ROUNDED = 1e-7, 3e-2
"""Largest difference as a share of the largest magnitude: where all is computed in double
precision, and where a kernel has only a lower one."""
SMALLEST_SHARE = 1e-3
"""A gradient's magnitude counts as at least this share of the largest one's: some are zero but for
rounding."""


def compared_graph(gm: torch.fx.GraphModule, step: TracedStep) -> torch.fx.GraphModule:
    """A copy of a clean graph with the results that are compared: the loss, further outputs, then
    `TracedStep.extra`."""
    given = results(gm)
    heads = [given[k] for k, out in enumerate(step.outputs) if out.role in ("loss", "output")]
    return part(gm, [*heads, *given[len(given) - len(step.extra) :]])


def part(gm: torch.fx.GraphModule, wanted: Sequence[Node]) -> torch.fx.GraphModule:
    """A graph with all inputs and only some results."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    graph.graph_copy(gm.graph, copies)
    graph.output([copies[node] for node in wanted])
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    return _LazyGraphModule(gm, graph)


@dataclass(frozen=True)
class Numbers:
    """Results of a compared graph.

    Attributes:
        named: The loss, further outputs, and gradients, by name.
        is_exact: Whether all was computed in double precision.
        counts: What a loss was divided by.
    """

    named: dict[str, torch.Tensor]
    is_exact: bool
    counts: dict[str, torch.Tensor]


def numbers(step: TracedStep, values: ExampleValues) -> Numbers:
    """What a traced step gives, on values.

    Raises:
        NotEvaluatedError: It cannot be computed here.
    """
    gm = step.compared
    assert gm is not None
    reason = why_too_large(gm, values.device, values.is_made_up)
    if reason:
        raise NotEvaluatedError(reason)
    made, is_exact = evaluate(gm, values.of(step), values.device)
    if not is_host(values.device.type):
        made = [tensor.cpu() for tensor in made]
        torch.cuda.empty_cache()
    names = [out.name for out in step.outputs if out.role in ("loss", "output")]
    names = ["the loss" if name == "loss" else f"{name!r}" for name in names]
    named = dict(zip([*names, *step.extra], made, strict=True))
    counts = {name: named.pop(name) for name in tuple(named) if name.startswith("count ")}
    return Numbers(named, is_exact, counts)


def shared_count(found: Numbers, expected: Numbers, share: float, is_whole: Sequence[bool]) -> str:
    """A count of what a model gives, by which a chunk divides as by its part of the whole batch's.

    Then the losses are the same where all chunks count alike, and only there.

    Args:
        found, expected: Of the step in chunks, and of the whole batch.
        share: Part of the rows that the chunk has.
        is_whole: For each count whether chunks divide by that of the whole batch.
    """
    for k, is_used in enumerate(is_whole):
        mine, theirs = (each.counts.get(f"count {k}") for each in (found, expected))
        if is_used or mine is None or theirs is None or not bool(theirs):
            continue
        if share < 1 and abs(float(mine) - share * float(theirs)) <= EXACT * abs(float(theirs)):
            return (
                f"it is divided by a count of what the model gives: {float(mine):g} in a "
                f"micro-batch and {float(theirs):g} in the whole batch, the same part only"
            )
    return ""


def difference(found: Numbers, expected: Numbers) -> str:
    """The first result that is another: its name with both values; empty if there is none."""
    limit = EXACT if found.is_exact and expected.is_exact else ROUNDED
    gradients = {n: _magnitude(t) for n, t in expected.named.items() if n.startswith("gradient")}
    smallest = SMALLEST_SHARE * max(gradients.values(), default=0.0)
    for name, theirs in expected.named.items():
        mine = found.named[name]
        error = _error(mine, theirs, smallest if name in gradients else 0.0)
        if error > limit:
            if theirs.numel() == mine.numel() == 1:
                digits = 6 if error > 1e-4 else 12
                return f"{name} is {mine.item():.{digits}g} instead of {theirs.item():.{digits}g}"
            if error == float("inf"):
                return f"{name} is another one"
            return f"{name} is off by {error:.1e} of its largest value"
    return ""


class ExampleValues:
    """ExampleValues of a step's inputs: the user's; made-up ones for what is on the meta device.

    Args:
        request: With the batch as it is cut.
        step: Any step of the request.
        is_varied: Whether inputs that are cut and have one value everywhere, such as a mask of
            ones, get several: what is divided by their sum is else the same in all micro-batches.

    Attributes:
        device: Where to compute.
        is_made_up: Whether anything is made up.
        can_vary: Whether there is such an input.
    """

    def __init__(self, request: CaptureRequest, step: TracedStep, is_varied: bool = False) -> None:
        self._request = request
        self.is_varied = is_varied
        self._made: dict[tuple[object, ...], torch.Tensor] = {}
        known = [self._own(step, place) for place in range(len(step.inputs))]
        tensors = [tensor for tensor in known if tensor is not None]
        self.is_made_up = any(tensor.is_meta for tensor in tensors)
        self.device = torch.device("cpu")
        if not (is_host(request.device_type) or self.is_made_up) and torch.cuda.is_available():
            gpus = (tensor.device for tensor in tensors if tensor.is_cuda)
            self.device = next(gpus, torch.device("cuda", torch.cuda.current_device()))
        rows = zip(request.batch.leaves, request.batch.dims, strict=True)
        self._uniform = {
            k for k, (leaf, dim) in enumerate(rows) if dim is not None and _varies(leaf)
        }
        self.can_vary = bool(self._uniform)

    def of(self, step: TracedStep) -> Callable[[int], torch.Tensor]:
        """Place of an input of a step -> its value."""

        def value(place: int) -> torch.Tensor:
            own, entry = self._own(step, place), step.inputs[place]
            changes = self.is_varied and entry.kind == "input" and entry.slot in self._uniform
            if own is not None and not own.is_meta and not changes:
                return own
            key = (entry.kind, entry.key, entry.slot)
            if key not in self._made:
                like = torch.zeros((), device="meta") if own is None else own
                seed = len(self._made)
                make = varied(like, seed) if changes else made_up(like, entry.kind, seed)
                self._made[key] = make
            return self._made[key]

        return value

    def _own(self, step: TracedStep, place: int) -> torch.Tensor | None:
        entry, sources = step.inputs[place], self._request.sources
        known = {
            "parameter": sources.parameters,
            "buffer": sources.buffers,
            "constant": sources.hollow,
        }
        if entry.kind == "input":
            leaf: torch.Tensor = self._request.batch.leaves[int(entry.slot)]
            return leaf
        return known.get(entry.kind, {}).get(entry.key)


def made_up(like: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    """Small values: integers are 0 or 1, vectors of a model positive, as variances are."""
    generator = torch.Generator().manual_seed(seed)
    if not (like.is_floating_point() or like.is_complex()):
        return torch.randint(0, 2, like.shape, generator=generator).to(like.dtype)
    if like.ndim < 2 and kind != "input":
        return (torch.rand(like.shape, generator=generator) + 0.5).to(like.dtype)
    width = like.shape[-1] if kind != "input" else 1
    return (torch.randn(like.shape, generator=generator) / max(width, 1) ** 0.5).to(like.dtype)


def _varies(leaf: torch.Tensor) -> bool:
    """Whether a tensor has one value everywhere, and may have others: integers only 0 and 1."""
    if leaf.is_meta or leaf.numel() < 2 or leaf.is_complex():
        return False
    first = leaf.flatten()[0]
    return bool((leaf == first).all()) and (leaf.is_floating_point() or int(first) in (0, 1))


def varied(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Other values of a uniform tensor: bits, the first of each row as they are; for floating
    numbers the same times a number from 0.5 to 1.5, for zeros numbers from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(like.shape, generator=generator).to(like.device)
    if like.is_floating_point():
        return (like * (drawn + 0.5) if bool(like.any()) else drawn).to(like.dtype)
    bits = (drawn < 0.5).to(like.dtype)
    bits[..., 0] = like[..., 0]
    return bits


def _magnitude(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    return float(tensor.abs().double().nan_to_num(0.0, 0.0, 0.0).max())


def _error(mine: torch.Tensor, theirs: torch.Tensor, smallest: float) -> float:
    """Largest difference as a share of the largest magnitude; NaN in both is no difference."""
    if mine.shape != theirs.shape:
        return float("inf")
    if torch.equal(mine, theirs):
        return 0.0
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return float("inf")
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    if bool((mine.isfinite() != theirs.isfinite()).any()):
        return float("inf")
    largest = _magnitude((mine - theirs).masked_fill(same, 0))
    scale = max(_magnitude(theirs), smallest)
    return 0.0 if largest == 0 else largest / scale if scale else float("inf")
