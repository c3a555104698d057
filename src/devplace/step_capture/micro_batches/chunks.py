"""Trace a step in micro-batches and compare it with the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch

from devplace.errors import CaptureError
from devplace.step_capture.analysis import is_random, results
from devplace.step_capture.guards.frames import Frames
from devplace.step_capture.micro_batches.blame import Difference, ancestors, first_difference
from devplace.step_capture.micro_batches.chunk_loss import Whole
from devplace.step_capture.micro_batches.compare import (
    ExampleValues,
    Numbers,
    difference,
    numbers,
    part,
    shared_count,
)
from devplace.step_capture.micro_batches.double_precision import KernelError, NotEvaluatedError
from devplace.step_capture.refuse import NotInChunksError
from devplace.step_capture.request import CaptureRequest
from devplace.step_capture.step import TracedStep

Traced: TypeAlias = tuple[TracedStep, torch.fx.GraphModule]
Trace: TypeAlias = Callable[[CaptureRequest, Frames | None], Traced]
"""Traces a step, which is not rehearsed if that was done."""
MAX_ADVISED_NODES = 3000
"""Of a step of which other ways to cut an input are tried, for the message."""


@dataclass
class Known:
    """What captures of a step find out that does not depend on the number of micro-batches.

    Attributes:
        frames: What a rehearsal noted.
        reference: The step of the whole batch, once one in micro-batches was compared with it.
        blocks: Modules that some captures compute again and others do not.
        whole: If there are such, the trace of the whole batch, by whether it is to be fused.
    """

    frames: Frames | None = None
    reference: _Reference | None = None
    blocks: tuple[str, ...] = ()
    whole: dict[bool, Traced] = field(default_factory=dict)


def trace_chunks(
    request: CaptureRequest, trace: Trace, known: Known
) -> tuple[TracedStep, torch.fx.GraphModule, str]:
    """Trace a step in micro-batches, and see that loss and gradients are those of the whole batch.

    Args:
        request: The step, with a batch that is cut.
        trace: Traces a step.
        known: Of earlier captures of the same step; what is found is added.

    Returns:
        The step, its graph, and why it was not compared; empty if it was.

    Raises:
        CaptureError: They are not; names the first op that differs, and the input.

    Warns:
        UserWarning: They could not be compared.
    """
    if known.reference is None or not known.reference.serves(request):
        known.reference = _Reference(request, trace, known.frames)
        known.frames = known.reference.frames
    whole = known.reference.told_of(request)
    failed: list[CaptureError] = []
    others: list[_Different] = []
    for way in whole.ways():
        try:
            step, gm = trace(way, whole.frames)
        except CaptureError as error:
            failed.append(error)
            continue
        found = whole.difference(step)
        if found is None:
            return step, gm, _told(request, whole.unchecked)
        others.append(found)
    raise whole.differs(others) if others else whole.failed(failed[-1])


def _told(request: CaptureRequest, unchecked: str) -> str:
    if unchecked:
        warnings.warn(
            f"micro_batches={len(request.batch.sizes)}: loss and gradients were not compared with "
            f"those of the whole batch: {unchecked}. Compare the first loss with that of "
            f"micro_batches=1.",
            stacklevel=4,
        )
    return unchecked


class _Different(NamedTuple):
    """What is another number, in which step, on which values."""

    text: str
    step: TracedStep
    values: ExampleValues


class _Reference:
    """The step of the whole batch.

    Attributes:
        frames: What its rehearsal noted.
        unchecked: Why nothing can be compared; empty if it can.
    """

    def __init__(self, request: CaptureRequest, trace: Trace, frames: Frames | None) -> None:
        self._request = replace(request, is_compared=True)
        self._trace = trace
        alone = replace(
            self._request,
            batch=request.batch.whole(),
            stack_gradients=False,
            stack_inputs=False,
            fuse=False,
            recompute=(),
        )
        self._step, _ = trace(alone, frames)
        self.frames = self._step.frames
        assert self._step.compared is not None
        self._gm = self._step.compared
        self._whole = self._counts()
        self._expected: list[tuple[ExampleValues, Numbers]] = []
        self.unchecked = ""
        if not request.compares_batches:
            return
        try:
            values = ExampleValues(request, self._step)
            self._expected.append((values, numbers(self._step, values)))
            varied = ExampleValues(request, self._step, is_varied=True)
            if varied.can_vary:
                self._expected.append((varied, numbers(self._step, varied)))
        except NotEvaluatedError as error:
            self.unchecked = "" if self._expected else str(error)

    def serves(self, request: CaptureRequest) -> bool:
        """Whether it is the whole batch of a request, which may be cut otherwise."""
        return self._request.batch.dims == request.batch.dims

    def told_of(self, request: CaptureRequest) -> _Reference:
        """The same, for a request that may be cut otherwise."""
        other = copy(self)
        other._request = replace(request, is_compared=bool(self._expected))
        return other

    def ways(self) -> Iterator[CaptureRequest]:
        """Requests of micro-batches, the likeliest first: by counts of the whole batch, by those of
        each chunk, and with losses that add up."""
        request = self._request
        yield replace(request, whole=self._whole)
        if self.has_counts:
            yield replace(request, whole=replace(self._whole, counts=None))
        if self._expected and not request.adds_up:
            yield replace(request, whole=self._whole, adds_up=True)

    @property
    def has_counts(self) -> bool:
        """Whether losses divide by counts of the inputs."""
        return any(self._whole.counts or ())

    def difference(self, step: TracedStep) -> _Different | None:
        """What is another number in micro-batches; None if nothing is."""
        for values, expected in self._expected:
            try:
                found = numbers(step, values)
            except KernelError as error:  # which it did not for the whole batch
                return _Different(str(error), step, values)
            except NotEvaluatedError as error:
                self.unchecked = str(error)
                continue
            text = difference(found, expected)
            text = text or shared_count(found, expected, step.share, self._whole.counts or ())
            if text:
                others = ", with other values in inputs that have one everywhere"
                text += f" on the example batch{others if values.is_varied else ''}"
                return _Different(text, step, values)
        return None

    def differs(self, ways: Sequence[_Different]) -> CaptureError:
        """The error of differences: of the way that is right the longest."""
        batch = self._request.batch
        blamed = [self._blame(way) for way in ways]
        orders = [-1 if found is None else found.place_in_order for found in blamed]
        last = orders.index(max(orders))
        found, text = blamed[last], ways[last].text
        text = (
            f"Micro-batches must give the loss and gradients of the whole batch, but with "
            f"micro_batches={len(batch.sizes)} {text}."
        )
        names = []
        if found is not None:
            names = [n for n in found.inputs if n in self._cut()]
            reads = f", of input {', '.join(map(repr, names))}" if names else ""
            text += f" The first op that gives another value: {found.op} at {found.place}{reads}."
        return CaptureError(f"{text} {self._advice(names or list(self._cut()))}")

    def _blame(self, way: _Different) -> Difference | None:
        gm = way.step.compared
        assert gm is not None
        return first_difference(
            self._gm,
            gm,
            self._request.batch.sizes,
            way.values.of(self._step),
            way.values.of(way.step),
            way.values.device,
            [entry.key if entry.kind == "input" else "" for entry in way.step.inputs],
        )

    def failed(self, error: CaptureError) -> CaptureError:
        """The error of micro-batches that cannot be traced, while the whole batch can."""
        if not isinstance(error, NotInChunksError):
            return error
        cut = ", ".join(f"{name!r} {shape}" for name, shape in self._cut().items())
        return CaptureError(
            f"The step can be captured as one batch, but not with micro_batches="
            f"{len(self._request.batch.sizes)}. {error} Inputs that are cut: {cut}. "
            f"{self._advice(list(self._cut()))}"
        )

    # ---- what the whole batch says

    def _counts(self) -> Whole:
        """The numbers that losses are divided by, as far as they are made of inputs alone."""
        step, batch = self._step, self._request.batch
        given = results(self._gm)
        nodes = dict(zip(step.extra, given[len(given) - len(step.extra) :], strict=True))
        made = [nodes.get(f"count {k}") for k in range(len(step.counts))]
        inputs = self._gm.graph.find_nodes(op="placeholder")
        cut = {
            node
            for node, entry in zip(inputs, step.inputs, strict=True)
            if entry.kind == "input" and batch.dims[int(entry.slot)] is not None
        }
        other = {
            node
            for node, entry in zip(inputs, step.inputs, strict=True)
            if entry.kind not in ("input", "buffer", "constant")
        }
        used = []
        for node in made:
            read = ancestors(node) if node is not None else set()
            used.append(bool(read & cut) and not read & other and not any(map(is_random, read)))
        counts = [n for n, is_used in zip(made, used, strict=True) if is_used and n is not None]
        return Whole(tuple(used), part(self._gm, counts), step.shapes)

    def _cut(self) -> dict[str, list[int]]:
        """Name of each input that is cut -> its shape."""
        batch = self._request.batch
        rows = zip(batch.names, batch.leaves, batch.dims, strict=True)
        return {name: list(leaf.shape) for name, leaf, dim in rows if dim is not None}

    def _advice(self, names: Sequence[str]) -> str:
        """What to do: another way to cut one of the inputs if that is found to be right."""
        batch = self._request.batch
        if len(self._gm.graph.nodes) <= MAX_ADVISED_NODES and self._expected:
            tensors = [batch.names[k] for k in batch.tensor_slots]
            for name in dict.fromkeys([*names, *tensors]):
                k = batch.names.index(name)
                for dim in self._other_dims(k):
                    dims = (*batch.dims[:k], dim, *batch.dims[k + 1 :])
                    if self._is_right(replace(self._request, batch=replace(batch, dims=dims))):
                        meaning = (
                            "is read whole" if dim is None else f"has its rows in dimension {dim}"
                        )
                        return (
                            f"It is the same if {name!r} {meaning}: batch_dims={{{name!r}: {dim}}}."
                        )
        first = names[0] if names else "0"
        return (
            f"Give the dimension of each input's rows where it is not the first "
            f"(batch_dims={{{first!r}: 1}}; None: all micro-batches read all of it), let loss_fn "
            f"return (loss_sum, weight) for a mean over other things than rows, use "
            f"micro_batches=1, or accept it with compare_batches=False."
        )

    def _other_dims(self, k: int) -> Iterator[int | None]:
        batch = self._request.batch
        is_cut = batch.dims[k] is not None
        if is_cut and any(dim is not None for dim in batch.dims[:k]):  # the first has the rows
            yield None
        for dim, size in enumerate(batch.leaves[k].shape):
            if size == sum(batch.sizes) and dim != batch.dims[k]:
                yield dim

    def _is_right(self, request: CaptureRequest) -> bool:
        try:
            step, _ = self._trace(replace(request, whole=self._whole), self.frames)
        except CaptureError:
            return False
        return self.difference(step) is None and not self.unchecked
