"""Whether a step fits a machine, on steps whose memory can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from devplace.auto.fit import Fit, fit, fit_steps
from devplace.auto.planning import find_target
from devplace.auto.step_variants import StepVariants
from devplace.errors import CaptureError
from devplace.graph.serialize import fingerprint
from devplace.step_capture import capture
from devplace.units import SIZE_UNITS

MB = SIZE_UNITS["MB"]
BLOCKS, ROWS, TOKENS, WIDTH = 16, 2, 512, 64
KEPT = ROWS * TOKENS * WIDTH * 4
"""Bytes of one activation: 262,144."""


class Block(nn.Module):
    """Keeps two activations for its backward pass: what it reads, and what the tanh gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[rows, tokens, width]` to the same shape."""
        return x + torch.tanh(self.linear(x))


def tall(rows: int = ROWS, blocks: int = BLOCKS) -> tuple[Any, ...]:
    """Much to keep, few weights: of 16 blocks 32 activations, 8.4 MB, and 16 x 16 KiB of weights.

    Computing blocks again keeps 16 activations, 4.2 MB, and what one block needs at a time.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(blocks)))
        x = torch.empty(rows, TOKENS, WIDTH)
    return model, (x,), lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1)


def wide() -> tuple[Any, ...]:
    """Many weights, little to keep: 8 x 256 KiB of weights and as much twice of state: 6.3 MB; at
    most 2.1 MB of gradients."""
    with torch.device("meta"):
        layers = (nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh()) for _ in range(8))
        model = nn.Sequential(*layers)
        x = torch.empty(ROWS, 256)
    return model, (x,), lambda m, x: m(x).sum(), torch.optim.Adam(model.parameters())


def limits(count: int, limit: int) -> dict[str, int]:
    """So much memory for so many GPUs."""
    return {f"cuda:{index}": limit for index in range(count)}


def on(step: tuple[Any, ...], count: int, limit: int) -> Fit:
    """The step on so many GPUs with so much memory each; without largest batches."""
    target = find_target(f"k40x{count}", limits(count, limit), device="cpu")
    return fit_steps(StepVariants(*step), target, evaluations=50)


def test_a_step_with_room_fits_as_it_is_on_one_device() -> None:
    """12 MB are enough for all that is kept, with weights and gradients."""
    found = on(tall(), 2, 12 * MB)
    first = found.ways[0]
    assert first.fits
    assert found.best is first
    assert first.devices == ("cuda:0",)
    assert first.peak_bytes >= 2 * BLOCKS * KEPT
    assert found.slower(first) == 0


def test_a_step_that_fits_only_with_recompute() -> None:
    """8 MB are less than what is kept, and more than half of it with one block: only computing
    blocks again helps on one GPU, as two rows cannot be four micro-batches."""
    found = on(tall(), 1, 8 * MB)
    as_it_is, recompute, chunks, both = found.ways
    assert as_it_is.missing_bytes["cuda:0"] >= 2 * BLOCKS * KEPT - 8 * MB
    assert as_it_is.missing_bytes["cuda:0"] == as_it_is.peak_bytes - 8 * MB
    assert recompute.fits
    assert BLOCKS * KEPT <= recompute.peak_bytes <= 8 * MB
    assert found.best is recompute
    assert found.slower(recompute) > 0
    assert "micro-batches" in chunks.reason
    assert "micro-batches" in both.reason
    assert not chunks.fits
    assert not both.fits


def test_recompute_spares_a_device() -> None:
    """With two such GPUs the step fits as it is on both, and on one with blocks computed again."""
    found = on(tall(), 2, 8 * MB)
    assert found.best is found.ways[0]
    assert len(found.ways[0].devices) == 2
    assert found.leanest is found.ways[1]
    assert len(found.ways[1].devices) == 1


def test_a_step_that_needs_two_devices() -> None:
    """Weights and state alone are 6.3 MB: on GPUs of 4.8 MB no way fits on one, and half of them
    with half of the gradients fit on two."""
    found = on(wide(), 4, 48 * MB // 10)
    as_it_is, recompute, *_ = found.ways
    assert as_it_is.fits
    assert len(as_it_is.devices) == 2
    assert recompute.fits
    assert len(recompute.devices) == 2


def test_a_step_that_fits_nowhere() -> None:
    """Two GPUs of 3 MB cannot hold 6.3 MB, which is proved, and the nearest placement lacks at
    least the difference."""
    found = on(wide(), 2, 3 * MB)
    static = 3 * 8 * 256 * 256 * 4
    assert found.best is None
    for way in found.ways[:2]:
        assert way.is_proved
        assert sum(way.missing_bytes.values()) >= static - 6 * MB


def test_not_even_one_row_may_fit() -> None:
    """Where the weights do not fit, a batch of one row is tried, and does not either."""
    found = fit(*wide(), machine="k40x2", limits=limits(2, 3 * MB), evaluations=50)
    assert [(each.rows, each.is_checked) for each in found.largest] == [(0, True)] * 2


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_row_does_not(which: int) -> None:
    """On one GPU, as it is and computing blocks again: found by brute force."""
    limit, blocks = 5 * MB, 4
    found = fit(*tall(2, blocks), machine="k40x1", limits=limits(1, limit)).largest[which]
    assert found.is_checked
    assert found.recompute == bool(which)
    assert on(tall(found.rows, blocks), 1, limit).ways[which].fits
    assert not on(tall(found.rows + 1, blocks), 1, limit).ways[which].fits


def test_a_row_takes_what_it_keeps() -> None:
    """Two activations of each block as it is; as many more rows fit as there is room for."""
    found = fit(*tall(), machine="k40x1", limits=limits(1, 20 * MB)).largest[0]
    row = 2 * BLOCKS * KEPT // ROWS
    assert row <= found.row_bytes < 1.25 * row
    assert 0 < found.rows <= 20 * MB // row


def test_the_same_seed_gives_the_same_answer() -> None:
    """With searches, which limits force."""
    first, second = (on(wide(), 2, 36 * MB // 10) for _ in range(2))
    assert first == second


def test_devices_are_added_from_the_largest_on() -> None:
    """Where one GPU has more memory it is the first, wherever it stands; CPUs are left out."""
    found = fit(*tall(), machine="k40x2", limits={"cuda:0": 7 * MB, "cuda:1": 12 * MB})
    assert found.devices == ("cuda:1", "cuda:0")
    assert found.ways[0].devices == ("cuda:1",)
    assert found.kind == "GPU"


def test_an_inference_has_one_way() -> None:
    """There is no backward pass to spare memory for, and the batch is taken as one."""
    model, inputs, *_ = tall()
    found = fit(model, inputs, machine="k40x2")
    assert [(way.recompute, way.micro_batches) for way in found.ways] == [(False, 1)]
    assert len(found.largest) == 1


def test_a_step_that_is_no_graph_is_refused() -> None:
    """As it is, it must be captured; the error is that of capture."""
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError):
        fit(model, (torch.ones(3, 4),), lambda m, x: m(x).sum() if m(x).sum() > 0 else m(x).mean())


@pytest.mark.parametrize("fuse", [False, True])
def test_ways_that_share_a_trace_are_the_graphs_of_their_own_captures(fuse: bool) -> None:
    """As it is and with recompute, of the given batch and another; the order does not matter."""
    model, (x,), loss, optimizer = tall(blocks=3)
    ways = [(False, 0), (True, 0), (True, 5), (False, 5), (False, 0)]
    for order in (ways, ways[::-1]):
        steps = StepVariants(model, (x,), loss, optimizer)
        for recompute, rows in order:
            given = torch.empty(rows or ROWS, TOKENS, WIDTH, device="meta")
            alone = capture(model, (given,), loss, optimizer, recompute=recompute, fuse=fuse)
            shared = steps.capture(recompute, rows=rows, fuse=fuse)
            assert fingerprint(shared) == fingerprint(alone)
            assert shared.meta["recompute"] == alone.meta["recompute"]
