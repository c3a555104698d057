"""Exceptions for users: each names the rule, the culprit, its value and the next step."""

from __future__ import annotations

from collections.abc import Iterable


class DevplaceError(Exception):
    """Base of all devplace errors; `exit_code` is what the command line exits with."""

    exit_code = 2


class InputError(DevplaceError):
    """Something the user gave is wrong: a file, a name, a number, an option."""


class ShapeError(InputError):
    """A batch has a shape that the step was not captured with.

    Attributes:
        culprit: What has which shape.
    """

    def __init__(self, message: str, culprit: str = "") -> None:
        super().__init__(message)
        self.culprit = culprit


class CaptureError(InputError):
    """The step cannot be captured as one graph; the message names module and source line."""


class GraphError(InputError):
    """A graph is malformed: cyclic, empty, dangling tensors, bad sizes."""


class MachineError(InputError):
    """A machine description is wrong; the message names line or field."""


class ProblemError(InputError):
    """Graph, machine, limits and pins do not form a placement problem."""


class PlanError(InputError):
    """A plan file is truncated, edited or otherwise unreadable."""


class InfeasibleError(DevplaceError):
    """No placement within the memory limits was found.

    Attributes:
        missing_bytes: Bytes lacking per device name in the best placement seen.
    """

    exit_code = 3

    def __init__(self, message: str, missing_bytes: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.missing_bytes = dict(missing_bytes or {})


class WriteError(DevplaceError):
    """What was asked for was found, but cannot be written."""

    exit_code = 1


class CheckpointError(InputError):
    """A checkpoint of a training run, or its curves, are damaged or of another run."""


class VerificationError(DevplaceError):
    """The placed step gave other numbers than the unplaced one, or that than an eager one."""

    exit_code = 4


class PlanMismatchError(DevplaceError):
    """A plan was made for another model, machine or version."""

    exit_code = 5


class ExecutionError(DevplaceError):
    """A step failed while it ran; the message names the op and its device."""

    exit_code = 1


class MeasuringError(DevplaceError):
    """Ops cannot be timed (any more): there is no process to do it in."""

    exit_code = 1


class CacheError(DevplaceError):
    """A file of measured values is damaged or of another version; it is not trusted."""

    exit_code = 1


class LateTensorError(ExecutionError):
    """A tensor did not reach a device in time; the message names it, its producer and consumer."""


class RankError(ExecutionError):
    """One of several processes that run a step together died, hangs or failed; the message names
    it, its host and the cause."""


class GraphCaptureError(ExecutionError):
    """A step cannot be held by CUDA graphs, and only graphs were asked for."""


class DeviceMemoryError(ExecutionError):
    """A device had too little memory for a step; what the step held was given back.

    Attributes:
        device: Name of the device.
        wanted_bytes: What was asked for last, 0 if not known.
        limit_bytes: What the process may use there, 0 if not known.
        predicted_bytes: Peak that the plan predicted there, 0 if not known.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        device: str = "",
        wanted_bytes: int = 0,
        limit_bytes: int = 0,
        predicted_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.device = device
        self.wanted_bytes = wanted_bytes
        self.limit_bytes = limit_bytes
        self.predicted_bytes = predicted_bytes


class DeviceLostError(ExecutionError):
    """A device cannot be used any more in this process, as after an illegal memory access."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the closest of `known`, whatever its case, or an empty text.

    Dashes of options count for nothing: all have them.

    Example:
        >>> did_you_mean("H100x", ["h100x4", "v100x4"])
        " Did you mean 'h100x4'?"
    """
    import difflib  # only mistakes need it

    written = {word.lower().lstrip("-"): word for word in known}
    close = difflib.get_close_matches(str(name).lower().lstrip("-"), written, n=1)
    return f" Did you mean {written[close[0]]!r}?" if close else ""
