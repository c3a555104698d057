"""Micro-batches compute what the whole batch does: both are traced, computed and compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from devplace.errors import CaptureError
from devplace.graph.capture.analysis import is_random, results
from devplace.graph.capture.blame import ancestors, first_difference
from devplace.graph.capture.chunk_loss import Whole
from devplace.graph.capture.evaluate import NotEvaluatedError, evaluate, why_too_large
from devplace.graph.capture.step import Request, Step

Node: TypeAlias = torch.fx.Node
Traced: TypeAlias = tuple[Step, torch.fx.GraphModule]
Trace: TypeAlias = Callable[[Request], Traced]
EXACT, ROUNDED = 1e-7, 3e-2
"""Largest difference as a share of the largest magnitude: where all is computed in double
precision, and where a kernel has only a lower one."""
SMALLEST_SHARE = 1e-3
"""A gradient's magnitude counts as at least this share of the largest one's: some are zero but for
rounding."""
MOST_ADVISED_NODES = 3000
"""Of a step of which other ways to cut an input are tried, for the message."""


def trace_chunks(request: Request, trace: Trace) -> tuple[Step, torch.fx.GraphModule, str]:
    """Trace a step in micro-batches, and see that loss and gradients are those of the whole batch.

    Returns:
        The step, its graph, and why it was not compared; empty if it was.

    Raises:
        CaptureError: They are not; names the first op that differs, and the input.

    Warns:
        UserWarning: They could not be compared.
    """
    whole = _Reference(request, trace)
    failures: list[CaptureError] = []
    for way in whole.ways():
        try:
            step, gm = trace(way)
        except CaptureError as error:
            failures.append(error)
            continue
        difference = whole.difference(step)
        if not difference:
            return step, gm, _told(request, whole.unchecked)
        failures.append(CaptureError(whole.explained(difference, step)))
    error = failures[0]
    if str(error).startswith(_CHANGED):
        raise error
    raise CaptureError(whole.failed(error)) from None


def compared_graph(gm: torch.fx.GraphModule, step: Step) -> torch.fx.GraphModule:
    """A copy of a clean graph with the results that are compared: the loss, further outputs, then
    `Step.extra`."""
    given = results(gm)
    heads = [given[k] for k, out in enumerate(step.outputs) if out.role in ("loss", "output")]
    return _part(gm, [*heads, *given[len(given) - len(step.extra) :]])


def _part(gm: torch.fx.GraphModule, wanted: Sequence[Node]) -> torch.fx.GraphModule:
    """A graph with all inputs and only some results."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    graph.graph_copy(gm.graph, copies)
    graph.output([copies[node] for node in wanted])
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    return torch.fx.GraphModule(gm, graph)


def _told(request: Request, unchecked: str) -> str:
    if unchecked:
        warnings.warn(
            f"micro_batches={len(request.batch.sizes)}: loss and gradients were not compared with "
            f"those of the whole batch: {unchecked}. Compare the first loss with that of "
            f"micro_batches=1.",
            stacklevel=4,
        )
    return unchecked


_CHANGED = "Micro-batches must give"


@dataclass
class _Numbers:
    """Results of a compared graph: loss and further outputs, then gradients, by name."""

    named: dict[str, torch.Tensor]
    is_exact: bool


class _Reference:
    """The step of the whole batch.

    Attributes:
        unchecked: Why nothing can be compared; empty if it can.
    """

    def __init__(self, request: Request, trace: Trace) -> None:
        self._request = replace(request, is_compared=True)
        self._trace = trace
        alone = replace(
            self._request,
            batch=request.batch.whole(),
            stack_gradients=False,
            stack_inputs=False,
            fuse=False,
        )
        self._step, _ = trace(alone)
        assert self._step.compared is not None
        self._gm = self._step.compared
        self._whole = self._counts()
        self._values = _Values(request, self._step)
        self.unchecked, self._expected = "", None
        try:
            self._expected = self._numbers(self._step)
        except NotEvaluatedError as error:
            self.unchecked = str(error)

    def ways(self) -> Iterator[Request]:
        """Requests of micro-batches, the likeliest first: by counts of the whole batch, by those of
        each chunk, and with losses that add up."""
        request = self._request
        yield replace(request, whole=self._whole)
        if any(self._whole.counts) and not self.unchecked:
            none = (False,) * len(self._whole.counts)
            yield replace(request, whole=replace(self._whole, counts=none, counts_of=_nothing))
        if not (request.adds_up or self.unchecked):
            yield replace(request, whole=self._whole, adds_up=True)

    def difference(self, step: Step) -> str:
        """What is another number in micro-batches: its name and both values; empty if nothing."""
        if self._expected is None:
            return ""
        try:
            found = self._numbers(step)
        except NotEvaluatedError as error:
            self.unchecked = str(error)
            return ""
        limit = EXACT if found.is_exact and self._expected.is_exact else ROUNDED
        pairs = [(n, found.named[n], t) for n, t in self._expected.named.items()]
        gradients = [_magnitude(t) for n, _, t in pairs if n.startswith("gradient")]
        smallest = SMALLEST_SHARE * max(gradients, default=0.0)
        for name, mine, theirs in pairs:
            error = _error(mine, theirs, smallest if name.startswith("gradient") else 0.0)
            if error > limit:
                numbers = f" is {float(mine):.6g} instead of {float(theirs):.6g}"
                return name + (
                    numbers if mine.numel() == 1 else f" is off by {error:.1e} of its largest value"
                )
        return ""

    def explained(self, difference: str, step: Step) -> str:
        """The message of a difference."""
        batch, values = self._request.batch, self._values
        assert step.compared is not None
        count = len(batch.sizes)
        found = first_difference(
            self._gm,
            step.compared,
            batch.sizes,
            values.of(self._step),
            values.of(step),
            values.device,
            [entry.key if entry.kind == "input" else "" for entry in step.inputs],
        )
        text = (
            f"{_CHANGED} the loss and gradients of the whole batch, but with micro_batches={count} "
            f"{difference} on the example batch."
        )
        names = []
        if found is not None:
            names = [n for n in found.inputs if n in self._cut()]
            reads = f", of input {' and '.join(map(repr, names))}" if names else ""
            text += f" The first op that gives another value: {found.op} at {found.place}{reads}."
        return f"{text} {self._advice(names or list(self._cut()))}"

    def failed(self, error: CaptureError) -> str:
        """The message of micro-batches that cannot be traced, while the whole batch can."""
        reason = str(error).partition(" Check that it runs eagerly")[0].rstrip(".")
        cut = ", ".join(f"{name!r} {shape}" for name, shape in self._cut().items())
        return (
            f"The step can be captured as one batch, but not with micro_batches="
            f"{len(self._request.batch.sizes)}: {reason}. Inputs that are cut: {cut}. "
            f"{self._advice(list(self._cut()))}"
        )

    # ---- what the whole batch says

    def _counts(self) -> Whole:
        """The numbers that losses are divided by, as far as they are made of inputs alone."""
        step, batch = self._step, self._request.batch
        made = results(self._gm)[len(results(self._gm)) - len(step.counts) :] if step.counts else ()
        inputs = [node for node in self._gm.graph.nodes if node.op == "placeholder"]
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
            read = ancestors(node)
            used.append(bool(read & cut) and not read & other and not any(map(is_random, read)))
        counts_of = _part(self._gm, [n for n, is_used in zip(made, used, strict=True) if is_used])
        return Whole(tuple(used), counts_of, step.shapes)

    def _numbers(self, step: Step) -> _Numbers:
        """Of a step.

        Raises:
            NotEvaluatedError: It cannot be computed here.
        """
        gm, values = step.compared, self._values
        assert gm is not None
        reason = why_too_large(gm, values.device, values.is_made_up)
        if reason:
            raise NotEvaluatedError(reason)
        made, is_exact = evaluate(gm, values.of(step), values.device)
        names = [out.name for out in step.outputs if out.role in ("loss", "output")]
        names = ["the loss" if name == "loss" else f"{name!r}" for name in names]
        named = dict(zip([*names, *step.extra], made, strict=True))
        return _Numbers({n: t for n, t in named.items() if not n.startswith("count ")}, is_exact)

    def _cut(self) -> dict[str, list[int]]:
        """Name of each input that is cut -> its shape."""
        batch = self._request.batch
        rows = zip(batch.names, batch.leaves, batch.dims, strict=True)
        return {name: list(leaf.shape) for name, leaf, dim in rows if dim is not None}

    def _advice(self, names: Sequence[str]) -> str:
        """What to do: another way to cut one of the inputs if that is found to be right."""
        batch = self._request.batch
        if len(self._gm.graph.nodes) <= MOST_ADVISED_NODES and not self.unchecked:
            for name in names:
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
            f"Say for inputs whose rows are not in the first dimension where they are, as "
            f"batch_dims={{{first!r}: 1}}, or None for what has none; let loss_fn return a pair "
            f"(loss_sum, weight) for a mean over other things than rows; or use micro_batches=1."
        )

    def _other_dims(self, k: int) -> Iterator[int | None]:
        batch = self._request.batch
        if sum(dim is not None for dim in batch.dims) > 1:
            yield None
        for dim, size in enumerate(batch.leaves[k].shape):
            if size == sum(batch.sizes) and dim != batch.dims[k]:
                yield dim

    def _is_right(self, request: Request) -> bool:
        try:
            step, _ = self._trace(replace(request, whole=self._whole))
        except CaptureError:
            return False
        return not self.difference(step) and not self.unchecked


def _nothing(*flat: torch.Tensor) -> list[torch.Tensor]:
    return []


class _Values:
    """Values of a step's inputs: the user's; made-up ones for what is on the meta device.

    Attributes:
        device: Where to compute.
        is_made_up: Whether anything is made up.
    """

    def __init__(self, request: Request, step: Step) -> None:
        self._request = request
        self._made: dict[str, torch.Tensor] = {}
        tensors = [
            t for t in (self._own(step, k) for k in range(len(step.inputs))) if t is not None
        ]
        self.is_made_up = any(tensor.is_meta for tensor in tensors)
        self.device = torch.device("cpu")
        if request.device_type == "cuda" and torch.cuda.is_available() and not self.is_made_up:
            gpus = (tensor.device for tensor in tensors if tensor.is_cuda)
            self.device = next(gpus, torch.device("cuda", torch.cuda.current_device()))

    def of(self, step: Step) -> Callable[[int], torch.Tensor]:
        """Place of an input of a step -> its value."""

        def value(place: int) -> torch.Tensor:
            own = self._own(step, place)
            if own is not None and not own.is_meta:
                return own
            entry = step.inputs[place]
            name = f"{entry.kind} {entry.key} {entry.slot}"
            if name not in self._made:
                like = torch.zeros((), device="meta") if own is None else own
                self._made[name] = made_up(like, entry.kind, len(self._made))
            return self._made[name]

        return value

    def _own(self, step: Step, place: int) -> torch.Tensor | None:
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
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    largest = _magnitude(torch.where(same, 0, mine - theirs) if mine.dtype != torch.bool else ~same)
    if bool((mine.isfinite() != theirs.isfinite()).any()):
        return float("inf")
    scale = max(_magnitude(theirs), smallest)
    return 0.0 if largest == 0 else largest / scale if scale else float("inf")
