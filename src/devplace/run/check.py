"""Check that a placed step gives the same numbers as the unplaced one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from devplace.errors import VerificationError
from devplace.graph import OpGraph
from devplace.graph.capture.batch import as_call
from devplace.graph.capture.several import as_one
from devplace.run.copies import clone_tensor
from devplace.run.executors import Executor, make_executor, runs_on_cuda
from devplace.run.inputs import bind_inputs, bind_scalars
from devplace.run.mailbox import CopyFunction
from devplace.run.schedule import Schedule, make_schedule
from devplace.run.state import ModelState, invent
from devplace.run.unplaced import run_unplaced

# Largest |placed - unplaced| allowed, as a share of the tensor's largest magnitude. Other strides
# after a copy can choose other matmul kernels; Adam amplifies rounding where gradients are near 0.
# A tensor far smaller than its kin (the second moment of a bias whose gradient is mathematically
# zero) holds nothing but rounding: its magnitude counts as at least SMALLEST_SHARE of the largest
# one among results of its kind.
SMALLEST_SHARE = 1e-3
LIMITS = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class TensorError:
    """How far one result of the placed step is from the unplaced one.

    Attributes:
        name: Name of the result.
        role: What it is: loss, output, parameter, buffer or state.
        step: 1-based checked step in which the error was largest.
        error: Largest difference divided by the largest magnitude in the unplaced tensor; for
            integers 0 or inf.
        limit: What is allowed for its dtype.
        is_bit_equal: Whether it was equal in every bit (NaN equals NaN) in every step.
    """

    name: str
    role: str
    step: int
    error: float
    limit: float
    is_bit_equal: bool


@dataclass(frozen=True)
class CheckReport:
    """Outcome of a check.

    Attributes:
        steps: Number of steps compared; a check ends with the first step that is wrong.
        tensors: One entry per result of the graph.
        num_transfers: Copies between devices per step.
    """

    steps: int
    tensors: tuple[TensorError, ...]
    num_transfers: int

    @property
    def is_bit_equal(self) -> bool:
        """Whether every result was equal in every bit in every step."""
        return all(tensor.is_bit_equal for tensor in self.tensors)

    @property
    def worst(self) -> TensorError:
        """The result with the largest error as a share of its limit."""
        return max(self.tensors, key=_severity)


def check(
    graph: OpGraph,
    model: Any,
    optimizer: Any,
    inputs: Any,
    device_of_op: Sequence[int],
    order: Sequence[Sequence[int]],
    device_names: Sequence[str],
    steps: int = 3,
    seed: int = 0,
    kwargs: Mapping[str, Any] | None = None,
    copy: CopyFunction = clone_tensor,
) -> CheckReport:
    """Run the placed and the unplaced step side by side and compare everything they leave behind.

    Both start from the model's values (made-up ones where it is on the meta device) and draw the
    same random numbers. The unplaced step runs node by node in trace order on one thread. Passes
    if no tensor is off by more than `LIMITS`; the report says whether all were equal bit for bit.
    Model and optimizer are not changed.

    Args:
        graph: The captured step, with its program.
        model: The model.
        optimizer: Its optimizer, or None.
        inputs: A batch, in a form that capture takes.
        device_of_op: Device index per op, shape `[V]`.
        order: Per device the indices of its ops in execution order.
        device_names: Names of the devices, shape `[D]`.
        steps: Number of steps, each continuing from the one before.
        seed: Seed of the random ops.
        kwargs: Named part of the batch.
        copy: Makes the copy of a transferred tensor.

    Raises:
        VerificationError: A tensor is off by more than its limit; names the worst one.
        PlanError: The order is incomplete or can never finish.
    """
    schedule = make_schedule(graph, device_of_op, order, device_names)
    pair = _Pair(graph, model, optimizer, seed, _reference_device(schedule))
    batch = _real_inputs(bind_inputs(graph, *as_call(inputs, kwargs)), seed)
    executor = make_executor(schedule, seed, copy)
    try:
        done, errors = pair.compare_steps(executor, batch, steps)
    finally:
        executor.close()
    report = CheckReport(done, tuple(errors), len(schedule.transfers))
    _raise_if_wrong(report)
    return report


class _Pair:
    """The placed and the unplaced step, each continuing from its own results."""

    def __init__(
        self, graph: OpGraph, model: Any, optimizer: Any, seed: int, device: str = "cpu"
    ) -> None:
        optimizer = as_one(optimizer)
        state = ModelState(graph, model, optimizer, invent_seed=seed)
        self._graph = graph
        self._seed = seed
        self._groups = None if optimizer is None else optimizer.param_groups
        self._since_capture = state.steps_since_capture()
        self._before_capture = state.steps_before_capture
        self._device = device
        self._sources = self._moved(state.read())

    def compare_steps(
        self, executor: Executor, batch: dict[int, Any], steps: int
    ) -> tuple[int, list[TensorError]]:
        """Steps done, and the largest error of every result over them; ends when one is wrong."""
        errors: list[TensorError] = []
        for op, value in self._sources.items():
            executor.put(op, value)
        for step in range(1, steps + 1):
            number = self._since_capture + step
            given = {**batch, **bind_scalars(self._graph, number, self._groups)}
            number += self._before_capture
            found = self._run_placed(executor, given, number)
            expected = self._run_unplaced(given, number)
            errors = _worse(errors, _compare_all(self._graph, found, expected, step))
            if any(tensor.error > tensor.limit for tensor in errors):
                return step, errors
        return steps, errors

    def _run_placed(self, executor: Executor, given: dict[int, Any], number: int) -> list[Any]:
        for op, value in given.items():
            executor.put(op, value)
        kept = executor.step(number).results
        return [
            kept[index] if result.replaces < 0 else executor.get(result.replaces)
            for index, result in enumerate(self._graph.results)
        ]

    def _run_unplaced(self, given: dict[int, Any], number: int) -> list[Any]:
        self._sources.update(self._moved(given))
        with _one_thread():
            expected = run_unplaced(self._graph, self._sources, self._seed, number, self._device)
        for result, value in zip(self._graph.results, expected, strict=True):
            if result.replaces >= 0:
                self._sources[result.replaces] = value
        return expected

    def _moved(self, values: Mapping[int, Any]) -> dict[int, Any]:
        if self._device == "cpu":
            return dict(values)
        return {op: value.to(self._device) for op, value in values.items()}


def compare(
    name: str, role: str, found: Any, expected: Any, step: int, smallest: float = 0.0
) -> TensorError:
    """Compare one tensor of the placed step with that of the unplaced one.

    Args:
        name, role: Of the result.
        found, expected: Its placed and unplaced value.
        step: Number of the step.
        smallest: Least magnitude the error is taken as a share of.
    """
    dtype = str(expected.dtype).removeprefix("torch.")
    limit = LIMITS.get(dtype, 0.0)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return TensorError(name, role, step, float("inf"), limit, False)
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if torch.equal(found, expected):
        return TensorError(name, role, step, 0.0, limit, True)
    if not (expected.is_floating_point() or expected.is_complex()):
        return TensorError(name, role, step, float("inf"), limit, False)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return TensorError(name, role, step, 0.0, limit, True)
    difference = (found - expected).abs()[~same]
    finite = expected[expected.isfinite()].abs()
    scale = max(smallest, float(finite.max()) if finite.numel() else 0.0)
    largest = float(difference.max())
    error = largest / scale if scale > 0 and largest == largest else float("inf")
    return TensorError(name, role, step, error, limit, False)


def _compare_all(
    graph: OpGraph, found: Sequence[Any], expected: Sequence[Any], step: int
) -> list[TensorError]:
    kinds = [(result.role, result.name.partition("[")[0]) for result in graph.results]
    kinds = [(role, slot if role == "state" else "") for role, slot in kinds]
    largest: dict[tuple[str, str], float] = {}
    for kind, theirs in zip(kinds, expected, strict=True):
        largest[kind] = max(largest.get(kind, 0.0), _magnitude(theirs))
    return [
        compare(result.name, result.role, mine, theirs, step, SMALLEST_SHARE * largest[kind])
        for result, kind, mine, theirs in zip(graph.results, kinds, found, expected, strict=True)
    ]


def _magnitude(value: Any) -> float:
    """Largest finite magnitude of a floating tensor; 0 for others."""
    if not value.is_floating_point() or value.numel() == 0:
        return 0.0
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _severity(tensor: TensorError) -> float:
    if tensor.error == 0:
        return 0.0
    return tensor.error / tensor.limit if tensor.limit > 0 else float("inf")


def _worse(old: list[TensorError], new: list[TensorError]) -> list[TensorError]:
    """Per tensor the worse of two comparisons; bit-equal only if both were."""
    if not old:
        return new
    merged = []
    for first, second in zip(old, new, strict=True):
        keep = first if first.error >= second.error else second
        equal = first.is_bit_equal and second.is_bit_equal
        merged.append(TensorError(keep.name, keep.role, keep.step, keep.error, keep.limit, equal))
    return merged


def _raise_if_wrong(report: CheckReport) -> None:
    wrong = [tensor for tensor in report.tensors if tensor.error > tensor.limit]
    if not wrong:
        return
    worst = max(wrong, key=lambda tensor: (_severity(tensor), tensor.error))
    raise VerificationError(
        f"The placed step must give the numbers of the unplaced one: {worst.role} {worst.name!r} "
        f"is off by {worst.error:.3g} of its largest value in step {worst.step}, allowed "
        f"{worst.limit:.3g}; {len(wrong)} of {len(report.tensors)} results are wrong. Do not use "
        "this plan; check the links between its devices and report the fault."
    )


def _real_inputs(batch: dict[int, Any], seed: int) -> dict[int, Any]:
    return {
        op: invent(value, "input", seed + op) if value.is_meta else value
        for op, value in batch.items()
    }


def _reference_device(schedule: Schedule) -> str:
    """Where the unplaced step runs: on the first GPU with ops, or the CPU."""
    if not runs_on_cuda(schedule):
        return "cpu"
    names = zip(schedule.device_names, schedule.instructions, strict=True)
    return next(name for name, some in names if some and name.startswith("cuda"))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over several threads round in another order than on a logical device's one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
