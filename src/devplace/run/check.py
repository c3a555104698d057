"""Compare a placed step with the unplaced one, and that with the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from devplace.device_kinds import CPU, kind_of
from devplace.errors import VerificationError
from devplace.graph import Captured
from devplace.graph.graph import StepResult
from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.copies import clone_tensor
from devplace.run.executors import Executor, accelerators_used, make_executor
from devplace.run.mailbox import CopyFunction
from devplace.run.own_step import OwnStep, run_own, why_not_run
from devplace.run.state import ModelState, invent
from devplace.run.unplaced import run_unplaced
from devplace.schedule import Schedule, make_schedule
from devplace.step_capture.batch import as_call
from devplace.step_capture.optimizers.several import as_one

# Largest |placed - unplaced| allowed, as a share of the tensor's largest magnitude. Other strides
# after a copy can choose other matmul kernels; Adam amplifies rounding where gradients are near 0.
# A tensor far smaller than its kin (the second moment of a bias whose gradient is mathematically
# zero) holds nothing but rounding: its magnitude counts as at least SMALLEST_SHARE of the largest
# one among results of its kind.
SMALLEST_SHARE = 1e-3
LIMITS = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Other kernels round otherwise than a step's (the libraries' norms and recurrent layers, compiled
# groups), and what lies at a kink falls to its other side: by so many times more may the captured
# step be off the user's own. A wrong element is off by much more than both.
OWN_FACTOR = 10


@dataclass(frozen=True)
class TensorError:
    """How far one result of a step is from what it is compared with.

    Attributes:
        name: Name of the result.
        role: What it is: loss, output, parameter, buffer or state.
        step: 1-based checked step in which the error was largest.
        error: Largest difference divided by the largest magnitude in the tensor it is compared
            with; for integers 0 or inf.
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
        own: The first captured, unplaced step beside the user's own, which PyTorch runs eagerly:
            one entry per result that both leave; empty where they cannot be compared.
        not_compared: Why they cannot, or may differ, as where micro-batches are meant to; else
            empty.
    """

    steps: int
    tensors: tuple[TensorError, ...]
    num_transfers: int
    own: tuple[TensorError, ...] = ()
    not_compared: str = ""

    @property
    def is_bit_equal(self) -> bool:
        """Whether every result was equal in every bit in every step."""
        return all(tensor.is_bit_equal for tensor in self.tensors)

    @property
    def worst(self) -> TensorError:
        """The result with the largest error as a share of its limit."""
        return max(self.tensors, key=_severity)

    @property
    def beside_own(self) -> str:
        """What the comparison with the user's own step gave, in words."""
        if self.not_compared and self.own:
            return f"other than an eager step of the whole batch: {self.not_compared}"
        if self.not_compared:
            return f"not compared with an eager step: {self.not_compared}"
        error = max((tensor.error for tensor in self.own), default=0.0)
        equal = f"equal within {error:.1e} of each tensor's largest value"
        if all(tensor.is_bit_equal for tensor in self.own):
            equal = "bit for bit equal"
        return f"{len(self.own)} results of the first step are {equal} to those of an eager step"


def check_step(
    graph: Captured,
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

    The first unplaced step is also compared with the user's own: forward, backward and
    `optimizer.step` as PyTorch runs them eagerly, on copies of all values. Where that cannot be
    (random numbers, values that are made up), the report says why.

    Both start from the model's values (made-up ones where it is on the meta device) and draw the
    same random numbers. The unplaced step runs node by node in trace order on one thread. Passes
    if no tensor is off by more than `LIMITS`; the report says whether all were equal bit for bit.
    Model and optimizer are not changed.

    Args:
        graph: The captured step.
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
        VerificationError: A tensor is off by more than its limit; names the worst one, or of the
            user's own step the first.
        PlanError: The order is incomplete or can never finish.
    """
    schedule = make_schedule(graph, device_of_op, order, device_names)
    pair = _Pair(graph, model, optimizer, seed, _reference_device(schedule))
    batch = _real_inputs(bind_inputs(graph, *as_call(inputs, kwargs)), seed)
    own, reason = compare_own(graph, model, optimizer, inputs, kwargs, lambda: pair.expect(batch))
    executor = make_executor(schedule, seed, copy)
    try:
        done, errors = pair.compare_steps(executor, batch, steps)
    finally:
        executor.close()
    report = CheckReport(done, tuple(errors), len(schedule.transfers), own, reason)
    _raise_if_wrong(report)
    return report


def compare_own(
    graph: Captured,
    model: Any,
    optimizer: Any,
    inputs: Any,
    kwargs: Any,
    find: Callable[[], Sequence[Any]],
) -> tuple[tuple[TensorError, ...], str]:
    """Compare the results of an unplaced step with those of the user's own, run eagerly.

    Args:
        graph, model, optimizer, inputs, kwargs: As for `check_step`.
        find: Gives the results of the unplaced step.

    Returns:
        One error per result that both leave, and why there are none, or they count for nothing.

    Raises:
        VerificationError: Names the first result that is off by more than its limit.
    """
    reason = why_not_run(graph, model, inputs, kwargs)
    if reason:
        return (), reason
    try:
        with _one_thread():
            own = run_own(graph, model, optimizer, inputs, kwargs)
    except Exception as error:  # whatever the user's code raises
        first = (str(error).strip().splitlines() or [""])[0]
        return (), f"it failed eagerly: {type(error).__name__}: {first}"
    limit = OWN_FACTOR * _coarsest(graph)
    results = [_without_rounding(graph, k, own, value, limit) for k, value in enumerate(find())]
    both = [k for k, value in enumerate(own.results) if value is not None]
    errors = _compare_all(
        [graph.results[k] for k in both],
        [results[k] for k in both],
        [own.results[k] for k in both],
        1,
    )
    errors = [replace(error, limit=max(error.limit, limit)) for error in errors]
    wrong = [error for error in errors if error.error > error.limit]
    count = graph.meta["micro_batches"]
    if wrong and count > 1:  # a mean over each, as batch norm takes, may be meant
        return tuple(errors), (
            f"{count} micro-batches give another {wrong[0].role} {wrong[0].name!r} than the whole "
            f"batch, by {wrong[0].error:.3g} of its largest value"
        )
    if wrong:
        raise VerificationError(
            f"The captured step must give the numbers of the eager one: {wrong[0].role} "
            f"{wrong[0].name!r} is off by {wrong[0].error:.3g} of its largest value, allowed "
            f"{wrong[0].limit:.3g}; {len(wrong)} of {len(errors)} results are wrong. Do not use "
            "this step: look for what a trace cannot see, such as values that change from call to "
            "call, or report the fault."
        )
    return tuple(errors), ""


def _coarsest(graph: Captured) -> float:
    """The largest limit of a dtype that the step computes in."""
    limit = max((LIMITS.get(tensor.dtype, 0.0) for tensor in graph.tensors), default=0.0)
    is_short = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if kind_of(graph.program.device).has_matrix_cores and is_short and limit == LIMITS["float32"]:
        return LIMITS["float16"]  # TF32 has as many digits
    return limit


def _without_rounding(graph: Captured, index: int, own: OwnStep, found: Any, limit: float) -> Any:
    """A new parameter with the user's own numbers where its gradient is nothing but rounding:
    optimizers that divide by its magnitude make a whole step of that."""
    result = graph.results[index]
    expected, gradient = own.results[index], own.gradients.get(result.name)
    if result.role != "parameter" or gradient is None or graph.meta["optimizer"] == "SGD":
        return found
    if expected is None or expected.shape != found.shape:
        return found
    largest = max(_magnitude(each) for each in own.gradients.values())
    return torch.where(gradient.abs() <= limit * largest, expected.detach(), found)


class _Pair:
    """The placed and the unplaced step, each continuing from its own results."""

    def __init__(
        self, graph: Captured, model: Any, optimizer: Any, seed: int, device: str = "cpu"
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

    def expect(self, batch: Mapping[int, Any]) -> list[Any]:
        """What the next unplaced step leaves behind; nothing is continued from it."""
        number = self._since_capture + 1
        given = {**batch, **bind_scalars(self._graph, number, self._groups)}
        sources = {**self._sources, **self._moved(given)}
        return self._unplaced(sources, number + self._before_capture)

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
            errors = _worse(errors, _compare_all(self._graph.results, found, expected, step))
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
        expected = self._unplaced(self._sources, number)
        for result, value in zip(self._graph.results, expected, strict=True):
            if result.replaces >= 0:
                self._sources[result.replaces] = value
        return expected

    def _unplaced(self, sources: Mapping[int, Any], number: int) -> list[Any]:
        with _one_thread():
            return run_unplaced(self._graph, sources, self._seed, number, self._device)

    def _moved(self, values: Mapping[int, Any]) -> dict[int, Any]:
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
    results: Sequence[StepResult], found: Sequence[Any], expected: Sequence[Any], step: int
) -> list[TensorError]:
    kinds = [(result.role, result.name.partition("[")[0]) for result in results]
    kinds = [(role, slot if role == "state" else "") for role, slot in kinds]
    largest: dict[tuple[str, str], float] = {}
    for kind, theirs in zip(kinds, expected, strict=True):
        largest[kind] = max(largest.get(kind, 0.0), _magnitude(theirs))
    return [
        compare(result.name, result.role, mine, theirs, step, SMALLEST_SHARE * largest[kind])
        for result, kind, mine, theirs in zip(results, kinds, found, expected, strict=True)
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
    return (accelerators_used(schedule) or [CPU.torch_type])[0]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over several threads round in another order than on a logical device's one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
