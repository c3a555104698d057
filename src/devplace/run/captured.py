"""What a captured step takes for granted about the model, checked before each step."""

from __future__ import annotations

from typing import Any

from devplace.errors import PlanMismatchError
from devplace.graph.program import Program


class CapturedFacts:
    """Training flags of modules and parameters; a step computes what they said at capture.

    Args:
        program: Of the captured step.
        model: The user's model; names that it lacks are not checked.
    """

    def __init__(self, program: Program, model: Any) -> None:
        self._model = model
        self._training = program.training
        modules = dict(model.named_modules())
        self._modes = [
            (modules[name], is_training, name)
            for name, is_training in program.modes.items()
            if name in modules
        ]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._trainable = [
            (parameters[name], is_trained, name)
            for name, is_trained in program.trainable.items()
            if name in parameters
        ]

    def check(self) -> None:
        """See that all is as at capture. About 50 ns per module and parameter.

        Raises:
            PlanMismatchError: Names what is not.
        """
        if self._model.training != self._training:
            raise _wrong_mode("it", "model", self._training)
        for module, is_training, name in self._modes:
            if module.training != is_training:
                where = f"model.get_submodule({name!r})"
                raise _wrong_mode(f"module {name!r}", where, is_training)
        for parameter, is_trained, name in self._trainable:
            if parameter.requires_grad != is_trained:
                now, then = ("frozen", "trained") if is_trained else ("to be trained", "frozen")
                raise PlanMismatchError(
                    f"What is trained is fixed at capture: parameter {name!r} is {now}, the step "
                    f"was captured with it {then}. Set its requires_grad to {is_trained}, or "
                    f"sync and capture again."
                )


def _wrong_mode(part: str, call: str, captured: bool) -> PlanMismatchError:
    now, then = ("eval", "train") if captured else ("train", "eval")
    return PlanMismatchError(
        f"The model must be in the mode it was captured in: {part} is in {now} mode, "
        f"the step was captured in {then} mode. Call {call}.{then}(), or capture again in {now} "
        f"mode."
    )
