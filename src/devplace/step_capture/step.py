"""The training step (or inference) as one function of flat tensors, ready to be traced."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from devplace.errors import CaptureError
from devplace.graph.program import Constant
from devplace.step_capture.assigned import (
    data_written,
    masks_written,
    refuse_attributes,
    refuse_other_buffers,
)
from devplace.step_capture.batch import check_leaf, leaf_names, open_objects
from devplace.step_capture.ctc import lengths_in_tensors
from devplace.step_capture.fakes import Fakes, windows_trusted
from devplace.step_capture.guards.frames import Frames, left_alone
from devplace.step_capture.guards.host_state import draws_on_host, host_watched
from devplace.step_capture.guards.twice import Recorder, refuse_kept
from devplace.step_capture.loss import (
    Returned,
    read_loss,
    refuse_learned_weight,
    refuse_lost_gradients,
)
from devplace.step_capture.micro_batches.chunk_loss import Counts, UnequalCountsError, joined
from devplace.step_capture.micro_batches.copies import Copies
from devplace.step_capture.moved import modules_stay
from devplace.step_capture.request import CaptureRequest, Input, Output, source_name
from devplace.step_capture.sources import Slots
from devplace.step_capture.tags import Tagger, describe_place, user_line

Tensors = list[torch.Tensor]
Named = dict[str, torch.Tensor]
Given = dict[str, dict[Any, torch.Tensor]]


@dataclass
class TracedStep:
    """Callable step over flat tensors; running it fills `outputs` and the output tree.

    Args:
        rehearsed: What a rehearsal of the same step, cut otherwise, has noted; it is not rehearsed
            again.

    Attributes:
        frames: What its functions read and write beside the tensors it is given.
        difference: What went otherwise when it ran once more, as the next step would.
        counts: What was divided by in each division of its losses, None if it is not one number;
            of a chunk with that `share` of the rows.
        extra: Further results for a comparison: name -> tensor of the trace; gradients and counts.
        shapes: Shape of each further output, None for what is no tensor.
        compared: Graph of the loss, the further outputs and `extra`, once it is traced.
        fakes: The mode of its fake tensors.
    """

    request: CaptureRequest
    tagger: Tagger
    inputs: list[Input] = field(init=False)
    outputs: list[Output] = field(default_factory=list)
    output_spec: Any = None
    output_leaves: tuple[Any, ...] = ()
    install: Callable[[], None] = lambda: None
    difference: Exception | None = None
    _recorder: Recorder | None = None
    counts: list[torch.Tensor | None] = field(default_factory=list)
    share: float = 1.0
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    shapes: tuple[torch.Size | None, ...] = ()
    compared: torch.fx.GraphModule | None = None
    fakes: Fakes = field(init=False)
    frames: Frames = field(init=False)
    rehearsed: InitVar[Frames | None] = None

    def __post_init__(self, rehearsed: Frames | None) -> None:
        sources, update = self.request.sources, self.request.update
        self._slots = Slots(self.request.model, sources)
        self._is_rehearsed = rehearsed is not None
        self.fakes = Fakes(self._place)
        self.frames = rehearsed or Frames(self.request.model, self.request.loss_fn, self._slots)
        self._own = {id(tensor): name for name, tensor in sources.parameters.items()}
        self.trained = [
            n
            for n, p in sources.parameters.items()
            if update and n in update.rules and p.requires_grad
        ]
        rules = update.rules if update else {}
        batch = self.request.batch
        self.inputs = [
            *(Input("parameter", n) for n in sources.parameters),
            *(Input("buffer", n) for n in sources.buffers),
            *(Input("state", n, s) for n in self.trained for s in rules[n].state_slots),
            *(Input("input", batch.names[i], i) for i in batch.tensor_slots),
            *(Input("constant", n) for n in sources.hollow),
            *(Input("scalar", s) for s in (update.scalar_names(self.trained) if update else ())),
        ]

    def __call__(self, *flat: torch.Tensor) -> Tensors:
        """Run on tensors in the order of `inputs`; gives tensors in the order of `outputs`."""
        self.install()
        given = _as_parameters(self._by_kind(flat))
        with self.tagger.module_hooks():
            if not self._is_rehearsed:  # unseen by the trace
                with disable_proxy_modes_tracing():
                    with self.frames.put_back():
                        made = self._rehearse(given)
                    if self.difference is None:
                        refuse_kept(made, self.frames.kept(), self.frames.name_of)
            self.tagger.restart()
            with _written(given), self.fakes.memory_hidden(), self.frames.put_back():
                self._slots.put(_sources(given))
                heads, grads = self._run(given)
                now = self._slots.get()
        parameters = self._check_parameters(given["parameter"], now)
        buffers = dict(zip(given["buffer"], now[len(parameters) :], strict=False))
        refuse_other_buffers(given["buffer"], buffers)
        if self.request.is_compared:
            self.extra = {f"gradient of {name!r}": grad for name, grad in grads.items()}
            counts = enumerate(self.counts)
            self.extra |= {f"count {k}": each for k, each in counts if each is not None}
        parameters, state = self._update(parameters, grads, given)
        changed = [*parameters.values(), *buffers.values(), *state.values()]
        self._describe(len(heads), len(changed), list(given["input"].values()))
        return [*heads, *changed, *given["input"].values(), *self.extra.values()]

    def _rehearse(self, given: Given) -> list[weakref.ref[torch.Tensor]]:
        """Run twice, the second time as the next step would; gives what both have made.

        What is wrong with the second is told when a trace has found nothing worse.
        """
        frames = self.frames
        with frames.followed():
            first = self._recorded(given)
        frames.note()
        made = first.made()
        try:
            with frames.followed_again():
                made += self._recorded(given, first).made()
            frames.refuse_lost(first.is_state, first.addresses)
        except Exception as error:
            self.difference = error
        drawn_from = frames.outliving.drawn_from()
        if drawn_from:
            raise draws_on_host("the step", drawn_from)
        frames.reads.let_go()
        self._recorder = self.fakes.call_of = None
        self.outputs, self.output_spec, self.output_leaves = [], None, ()
        return made

    def _recorded(self, like: Given, before: Recorder | None = None) -> Recorder:
        """Run once on new tensors, and record that."""
        slots = self._slots
        given: Given = {
            kind: {key: _new(tensor) for key, tensor in tensors.items()}
            for kind, tensors in like.items()
        }
        flat = _flat(_as_parameters(given))
        slots.put(_sources(given))
        recorder = self._recorder = Recorder(flat, self._place, before)
        watched = host_watched(recorder.drawn, self._place, before is not None)
        self.fakes.call_of = recorder.call_of
        with _written(given, recorder.left), self.fakes.memory_hidden(), recorder, watched:
            heads, grads = self._run(given)
        self.fakes.refuse_caught()
        self.frames.values_read |= {id(each): each for each in self.fakes.read_outside}
        now = slots.get()
        there = set(map(id, now))
        there -= {id(given["parameter"][name]) for name in self.trained}
        steady = {k for k, tensor in enumerate(flat) if id(tensor) in there}
        recorder.finish([heads, list(grads.items()), now], steady)
        return recorder

    def _place(self) -> str:
        return describe_place(self.tagger.current_module, user_line())

    @property
    def is_reference(self) -> bool:
        """Whether only what micro-batches are compared with is wanted, and no update."""
        return self.request.is_compared and not self.request.batch.is_cut

    def _by_kind(self, flat: Sequence[torch.Tensor]) -> dict[str, dict[Any, torch.Tensor]]:
        kinds = ("parameter", "buffer", "state", "input", "constant", "scalar")
        given: dict[str, dict[Any, torch.Tensor]] = {kind: {} for kind in kinds}
        for entry, tensor in zip(self.inputs, flat, strict=True):
            key: Any = entry.key
            if entry.kind == "state":
                key = (entry.key, entry.slot)
            elif entry.kind == "input":
                key = entry.slot
            given[entry.kind][key] = tensor
        return given

    def _check_parameters(
        self, given: dict[str, torch.Tensor], now: Tensors
    ) -> dict[str, torch.Tensor]:
        for (name, before), after in zip(given.items(), now[: len(given)], strict=True):
            if after is not before:
                raise CaptureError(
                    f"A parameter cannot be replaced during the step: {name!r} is assigned anew in "
                    f"forward. Change it in place, or make it a buffer."
                )
        return dict(given)

    def _describe(self, num_heads: int, num_changed: int, inputs: Tensors) -> None:
        assert len(self.outputs) == num_heads
        for index, entry in enumerate(self.inputs[:num_changed]):
            self.outputs.append(Output(entry.kind, source_name(entry), index))
        for index, entry in enumerate(self.inputs):
            if entry.kind == "input":
                self.outputs.append(Output("input", entry.key, index))

    # ---- forward and backward

    def _run(
        self, given: dict[str, dict[Any, torch.Tensor]]
    ) -> tuple[Tensors, dict[str, torch.Tensor]]:
        with torch.set_grad_enabled(self.request.has_gradients):
            own = given["parameter"] | given["buffer"]
            if self.request.mode == "inference":
                heads = self._infer(given["input"])
                refuse_attributes(own, self.request.sources.parameters)
                return heads, {}
            wanted = self._differentiated(given["parameter"])
            chunks = self._chunks(given["input"])
            whole = self._counts_of_whole(_flat(given))
            run = functools.partial(self._forward, chunks=chunks, counts=whole)
            first = run(0)
            refuse_attributes(own, self.request.sources.parameters)
            combine = self._mean if first.weight is None else self._weighted
            returned, loss, grads = combine(chunks, run, first, wanted)
        self.tagger.micro_batch = -1
        return self._loss_heads(returned, loss.detach()), grads

    def _counts_of_whole(self, flat: Tensors) -> list[torch.Tensor | None] | None:
        """What losses divide by, of the whole batch; None for what chunks have of their own."""
        if self.request.whole.counts is None:
            return None
        with self._owned("", "forward"), torch.no_grad():
            made = iter(self.request.whole.counts_of(*flat))
        return [next(made) if is_used else None for is_used in self.request.whole.counts]

    def _differentiated(self, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Trained parameters; all that require gradients when their norm is clipped."""
        if self.request.mode != "train":
            return {}
        clip = self.request.clip_grad_norm is not None
        trained = set(self.trained)
        return {n: p for n, p in parameters.items() if p.requires_grad and (clip or n in trained)}

    def _chunks(self, inputs: dict[int, torch.Tensor]) -> list[list[Any]]:
        batch = self.request.batch
        whole = [inputs.get(i, leaf) for i, leaf in enumerate(batch.leaves)]
        if not batch.sizes:
            return [whole]
        with self._owned("", "forward"):
            pieces = [
                [leaf] * len(batch.sizes)
                if dim is None
                else torch.split_with_sizes(leaf, list(batch.sizes), dim)
                for leaf, dim in zip(whole, batch.dims, strict=True)
            ]
        return [[piece[i] for piece in pieces] for i in range(len(batch.sizes))]

    def _call(self, leaves: list[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.request.batch.spec)
        dtype = self.request.autocast
        context: Any = contextlib.nullcontext()
        if dtype is not None:
            context = torch.autocast(self.request.device_type, dtype=dtype)
        with context:
            return self.request.call(*args, **kwargs)

    def run_eagerly(self) -> None:
        """Run forward and backward on the example batch, with the values that are there."""
        with (
            left_alone(self.request.model, self.request.loss_fn),
            torch.set_grad_enabled(self.request.has_gradients),
        ):
            returned = self._call(self.request.batch.leaves)
            wanted = self._differentiated(self.request.sources.parameters)
            if wanted:
                loss = read_loss(returned).loss
                torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)

    def _forward(
        self, index: int, chunks: list[list[Any]], counts: list[torch.Tensor | None] | None
    ) -> Returned:
        self.tagger.stage = "forward"
        self.tagger.micro_batch = index
        batch = self.request.batch
        mode: Any = contextlib.nullcontext()
        if batch.is_cut or self.request.is_compared:
            self.share = batch.shares[index] if batch.is_cut else 1.0
            mode = Counts(counts, self.share)
        with mode:
            returned = self._call(chunks[index])
        self.counts = getattr(mode, "found", [])
        if counts is not None and len(self.counts) != len(counts):
            raise UnequalCountsError(
                "Micro-batches must divide their losses as the whole batch does, but they divide "
                f"by {len(self.counts)} numbers, not {len(counts)}."
            )
        found = read_loss(returned)
        if self.request.mode == "train" and not found.loss.requires_grad:
            raise CaptureError(
                "The loss must depend on a trainable parameter: it does not require gradients. "
                "Check for no_grad, detach, or frozen parameters, or capture without an optimizer."
            )
        is_met = self._recorder.has_met if self._recorder is not None else lambda leaf: True
        runs_python = refuse_lost_gradients(
            found.loss, self._own, self.frames.outliving.names, is_met
        )
        if self._recorder is not None and runs_python:
            self._recorder.needs_backward = True
        if found.weight is not None:
            refuse_learned_weight(found.weight, self._places_of_parameters())
        return found

    def _places_of_parameters(self) -> dict[int, str]:
        """Inputs that are parameters: trained ones, or in an evaluation all."""
        is_training, trained = self.request.mode == "train", set(self.trained)
        places = [(k, i.key) for k, i in enumerate(self.inputs) if i.kind == "parameter"]
        return {k: name for k, name in places if name in trained or not is_training}

    def _infer(self, inputs: dict[int, torch.Tensor]) -> Tensors:
        chunks = self._chunks(inputs)
        self.tagger.micro_batch = 0
        tree = open_objects(self._call(chunks[0]))
        values, spec = pytree.tree_flatten(tree)
        heads = self._heads(leaf_names("output", tree), values, spec)
        if not heads:
            raise CaptureError("The model returned no tensor. Return one from forward.")
        return heads

    def _heads(
        self, names: Sequence[str], values: Sequence[Any], spec: Any, loss: int = -1
    ) -> Tensors:
        """The tensors among the leaves of an output, the loss first; notes what they are."""
        heads: Tensors = []
        places: dict[int, Any] = {}
        for index in sorted(range(len(values)), key=lambda k: k != loss):
            leaf = values[index]
            check_leaf(leaf, "Outputs")
            if isinstance(leaf, torch.Tensor):
                places[index] = len(heads)
                is_loss = index == loss
                role, name = ("loss", "loss") if is_loss else ("output", names[index])
                self.outputs.append(Output(role, name))
                heads.append(leaf if is_loss or not leaf.requires_grad else leaf.detach())
            else:
                places[index] = Constant(leaf)
        self.output_spec = spec
        self.output_leaves = tuple(places[index] for index in range(len(values)))
        return heads

    def _loss_heads(self, parts: list[Returned], loss: torch.Tensor) -> Tensors:
        """The loss, and what else the loss function gave for each micro-batch, put together."""
        first, batch, whole = parts[0], self.request.batch, self.request.whole
        if first.tree is None:
            self.outputs.append(Output("loss", "loss"))
            return [loss]
        (values, *others), (spec, *_) = zip(
            *(pytree.tree_flatten(part.tree) for part in parts), strict=True
        )
        values[first.place] = loss
        self.shapes = tuple(v.shape if isinstance(v, torch.Tensor) else None for v in values)
        if others:
            with self._owned("", "forward"), torch.no_grad():
                for k, name in enumerate(first.names):
                    if k != first.place:
                        pieces = [values[k], *(each[k] for each in others)]
                        values[k] = joined(name, pieces, batch.shares, whole.shapes[k])
        return self._heads(first.names, values, spec, first.place)

    def _mean(
        self,
        chunks: list[list[Any]],
        run: Callable[[int], Returned],
        first: Returned,
        wanted: Named,
    ) -> tuple[list[Returned], torch.Tensor, Named]:
        """Loss = sum of loss_i * rows_i / rows; of losses that add up, sum of loss_i."""
        if len(chunks) == 1:
            return [first], first.loss, self._backward([first.loss], [None], wanted)
        batch = self.request.batch

        def one(index: int, total: torch.Tensor | None) -> tuple[Returned, torch.Tensor, Named]:
            found = run(index) if index else first
            share = 1.0 if self.request.adds_up else batch.shares[index]
            with self._owned("", "forward"):
                part = found.loss.detach() * share
                total = part if total is None else total + part
                seed = torch.full_like(found.loss, share) if wanted else None
            return found, total, self._backward([found.loss], [seed], wanted)

        copies, sums = self._copies(), self._copies()
        parts: list[Returned] = []
        total: torch.Tensor | None = None
        grads: Named = {}
        for index, (chunk, size) in enumerate(zip(chunks, batch.sizes, strict=True)):
            call = functools.partial(one, index, total)
            found, total, new = copies.run(index, size, call, (chunk, total))
            add = functools.partial(self._added, grads, new)
            grads = sums.run(index, 0, add, (grads, new))
            parts.append(found)
        assert total is not None
        return parts, total, grads

    def _weighted(
        self,
        chunks: list[list[Any]],
        run: Callable[[int], Returned],
        first: Returned,
        wanted: Named,
    ) -> tuple[list[Returned], torch.Tensor, Named]:
        """Loss = sum of loss sums / sum of weights."""
        sizes = self.request.batch.sizes or (0,)
        copies, sums = self._copies(), self._copies()
        parts = [
            copies.run(k, size, functools.partial(run, k) if k else lambda: first, chunk)
            for k, (chunk, size) in enumerate(zip(chunks, sizes, strict=True))
        ]
        with self._owned("", "forward"):
            self.tagger.micro_batch = -1
            losses = [part.loss for part in parts]
            weights = [_require_weight(part.weight) for part in parts]
            loss_sum, weight_sum = (sum(t.detach() for t in ts) for ts in (losses, weights))
            weight_sum = weight_sum.to(losses[0].dtype)  # counts are integers
            total = loss_sum / weight_sum
            seed = weight_sum.reciprocal() if wanted else None

        def back(index: int) -> Named:
            roots, seeds = [losses[index]], [seed]
            if weights[index].requires_grad and seed is not None:
                roots, seeds = [losses[index], weights[index]], [seed, -total * seed]
            return self._backward(roots, seeds, wanted)

        grads: Named = {}
        for index, size in enumerate(sizes):
            new = copies.run(index, size, functools.partial(back, index))
            add = functools.partial(self._added, grads, new)
            grads = sums.run(index, 0, add, (grads, new))
        return parts, total, grads

    def _copies(self) -> Copies:
        return Copies(self.tagger, self._slots, self.request.copies_batches)

    def _backward(self, roots: Tensors, seeds: list[torch.Tensor | None], wanted: Named) -> Named:
        """Gradients of this micro-batch, of those that have any."""
        if not wanted or (self._recorder is not None and not self._recorder.sees_backward()):
            return {}
        self.tagger.stage = "backward"
        made = torch.autograd.grad(roots, list(wanted.values()), seeds, allow_unused=True)
        self.tagger.stage = "forward"
        grads = {n: grad for n, grad in zip(wanted, made, strict=True) if grad is not None}
        for name, grad in grads.items():
            if grad.layout != torch.strided:
                raise CaptureError(
                    f"Sparse gradients are not supported: {name!r} gets one. Set sparse=False."
                )
        return grads

    def _added(self, total: Named, grads: Named) -> Named:
        """Gradients of a micro-batch added to those of earlier ones."""
        total = dict(total)
        for name, grad in grads.items():
            with torch.no_grad(), self._owned(name.rpartition(".")[0], "backward"):
                total[name] = total[name] + grad if name in total else grad
        return total

    # ---- update

    def _update(
        self,
        parameters: dict[str, torch.Tensor],
        grads: dict[str, torch.Tensor],
        given: dict[str, dict[Any, torch.Tensor]],
    ) -> tuple[dict[str, torch.Tensor], dict[Any, torch.Tensor]]:
        parameters, state = dict(parameters), dict(given["state"])
        update = self.request.update
        if update is None or self.is_reference:
            return parameters, state
        with torch.no_grad():
            if self.request.clip_grad_norm is not None:
                grads = self._clip(grads, self.request.clip_grad_norm)
            for name in self.trained:
                if name not in grads:
                    continue
                rule = update.rules[name]
                with self._owned(name.rpartition(".")[0], "update"):
                    kept = {slot: state[name, slot] for slot in rule.state_slots}
                    given_now = parameters[name], grads[name], kept, given["scalar"]
                    parameters[name], new = rule.apply(*given_now, self.request.fuse)
                state.update({(name, slot): tensor for slot, tensor in new.items()})
        return parameters, state

    def _clip(self, grads: dict[str, torch.Tensor], limit: float) -> dict[str, torch.Tensor]:
        """As torch.nn.utils.clip_grad_norm_ over all parameters with gradients."""
        norms = []
        for name, grad in grads.items():
            with self._owned(name.rpartition(".")[0], "update"):
                norms.append(torch.linalg.vector_norm(grad))
        with self._owned("", "update"):
            total = torch.linalg.vector_norm(torch.stack(norms))
            factor = torch.clamp(limit / (total + 1e-6), max=1.0)
        clipped = {}
        for name, grad in grads.items():
            with self._owned(name.rpartition(".")[0], "update"):
                clipped[name] = (grad * factor).to(grad.dtype)
        return clipped

    @contextlib.contextmanager
    def _owned(self, module: str, stage: Any) -> Any:
        """Give the nodes made inside to a module and stage."""
        tagger = self.tagger
        before = tagger.owner, tagger.stage, tagger.micro_batch
        tagger.owner, tagger.stage = module, stage
        if stage == "update":
            tagger.micro_batch = -1
        try:
            yield
        finally:
            tagger.owner, tagger.stage, tagger.micro_batch = before


@contextlib.contextmanager
def _written(
    given: Given, left: Callable[[torch.Tensor, str], None] | None = None
) -> Iterator[None]:
    """Inside, assignments are writes, casts and CTC losses such that a trace can follow them."""
    with (
        data_written(given["parameter"] | given["buffer"], left),
        masks_written(),
        modules_stay(given["parameter"]),
        lengths_in_tensors(),
        windows_trusted(),
    ):
        yield


def _as_parameters(given: Given) -> Given:
    """The same; what stands for a parameter is one for `isinstance`."""
    for tensor in given["parameter"].values():
        tensor._is_param = True
    return given


def _flat(given: Given) -> Tensors:
    return [tensor for each in given.values() for tensor in each.values()]


def _sources(given: Given) -> Tensors:
    return [t for kind in ("parameter", "buffer", "constant") for t in given[kind].values()]


def _new(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.requires_grad_(like.requires_grad)


def _require_weight(weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        raise CaptureError("loss_fn must return a pair (loss_sum, weight) for every micro-batch.")
    return weight
