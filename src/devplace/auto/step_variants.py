"""One step captured in several ways: other batches, micro-batches, blocks computed again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from devplace.errors import CaptureError
from devplace.graph import Captured

if TYPE_CHECKING:
    from devplace.step_capture.micro_batches.chunks import Known


@dataclass(frozen=True, eq=False)
class StepVariants:
    """Captures of one step for the CPU, which can be planned for any machine.

    Each is captured once. With model, optimizer and batch on the meta device nothing is allocated.

    Attributes:
        model, example_inputs, loss_fn, optimizer: As for `capture`.
        options: All else that `capture` takes, but for what varies here.
        tell: Told what is being captured.
    """

    model: Any
    example_inputs: Any = ()
    loss_fn: Any = None
    optimizer: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda text: None
    _found: dict[tuple[bool, int, int, bool], Captured | CaptureError] = field(default_factory=dict)
    _known: dict[int, Known] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of the batch.

        Raises:
            CaptureError: No input has rows.
        """
        from devplace.step_capture.batch import num_rows

        return num_rows(*self._batch, self.options.get("batch_dims"))

    @property
    def _batch(self) -> tuple[Any, Any]:
        return self.example_inputs, self.options.get("example_kwargs")

    def capture(
        self, recompute: bool = False, micro_batches: int = 1, rows: int = 0, fuse: bool = False
    ) -> Captured:
        """The step so; captured before, if it was.

        Args:
            recompute, micro_batches, fuse: As for `capture`.
            rows: Rows of the batch; 0: as it was given.

        Raises:
            CaptureError: The step cannot be captured so.
        """
        key = recompute, micro_batches, rows, fuse
        if key not in self._found:
            try:
                self._found[key] = self._captured(*key)
            except CaptureError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, CaptureError):
            raise found
        return found

    def _captured(self, recompute: bool, micro_batches: int, rows: int, fuse: bool) -> Captured:
        from devplace.step_capture import capture
        from devplace.step_capture.batch import with_rows

        named = [
            "recompute" * recompute,
            f"{micro_batches} micro-batches" * (micro_batches > 1),
            f"a batch of {rows}" * (rows > 0),
        ]
        self.tell(f"capturing the step with {', '.join(filter(None, named)) or 'all kept'}")
        inputs, kwargs = self._batch
        if rows:
            inputs, kwargs = with_rows(rows, inputs, kwargs, self.options.get("batch_dims"))
        with warnings.catch_warnings():
            # Numbers of micro-batches are not what is asked here.
            warnings.filterwarnings("ignore", message="micro_batches=")
            return capture(
                self.model,
                inputs,
                self.loss_fn,
                self.optimizer,
                micro_batches,
                **{**self.options, "example_kwargs": kwargs},
                recompute=recompute,
                fuse=fuse,
                device="cpu",
                known=self._known_of(rows),
            )

    def _known_of(self, rows: int) -> Known:
        """What captures with so many rows share. Other batches are rehearsed no more than other
        micro-batches: only their memory is asked for."""
        from devplace.step_capture.micro_batches.chunks import Known
        from devplace.step_capture.rewrites.blocks import named_blocks

        if rows not in self._known:
            given = self._known.get(0)
            blocks: tuple[str, ...] = ()
            with contextlib.suppress(CaptureError):
                blocks = named_blocks(self.model, True)
            self._known[rows] = Known(given.frames if given else None, blocks=blocks)
        return self._known[rows]
