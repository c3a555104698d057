"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

SEED = click.IntRange(0, 2**63 - 1)
F = TypeVar("F", bound=Callable[..., Any])

_STEP_OPTIONS = [
    click.argument("model"),
    click.option(
        "--seed",
        default=0,
        show_default=True,
        type=SEED,
        metavar="NUMBER",
        help="Of weights, batch and search; the same seed and evaluations give the same plan.",
    ),
    click.option(
        "--size",
        default="full",
        show_default=True,
        metavar="small|full",
        help="Of a workload; small ones are for trying things out.",
    ),
    click.option("--batch", type=int, help="Samples per step; the model's own by default."),
    click.option(
        "--batch-dim",
        multiple=True,
        metavar="INPUT=DIM",
        help="Dimension of an input's rows, as 1=1; mask=whole if it has none.",
    ),
    click.option(
        "--compare-batches/--no-compare-batches",
        default=True,
        help="Refuse micro-batches that compute another loss than the whole batch (default).",
    ),
    click.option(
        "--clip-grad-norm", type=float, metavar="NORM", help="Largest 2-norm of all gradients."
    ),
    click.option("--autocast", metavar="bfloat16", help="Dtype of the forward pass."),
    click.option(
        "--optimizer",
        default="sgd",
        show_default=True,
        metavar="NAME[:OPTIONS]",
        help="Of torch.optim, as adamw:lr=1e-3,weight_decay=0.1.",
    ),
    click.option(
        "--limit", multiple=True, metavar="DEVICE=SIZE", help="Memory limit, as cuda:0=20GiB."
    ),
    click.option("--exclude", multiple=True, metavar="DEVICE", help="Do not use this device."),
    click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and only that."),
]
"""What all commands take that capture a step."""


def problem_options(command: F) -> F:
    """What plan and compare take: the step, the machine, and how to place."""
    options = [
        click.option(
            "--machine",
            default="detect",
            show_default=True,
            metavar="NAME|FILE",
            help="As k40x4, rtx4090+rtx3090x2, cpux2 or mine.toml; `devplace machines` lists all.",
        ),
        click.option(
            "--budget",
            default="30s",
            show_default=True,
            metavar="30s|2000ev",
            help="What a placer may spend: seconds, or evaluations.",
        ),
        click.option(
            "--micro-batches", default=1, show_default=True, type=int, help="Chunks of the batch."
        ),
        click.option(
            "--fuse/--no-fuse",
            default=None,
            help="Ops that one compiled kernel can compute are one op; default: for GPUs that "
            "PyTorch's compiler makes kernels for.",
        ),
        click.option(
            "--stack-gradients/--no-stack-gradients",
            default=None,
            help="One product for the gradient of a weight used many times; default: as --fuse.",
        ),
        click.option(
            "--recompute",
            is_flag=True,
            help="Compute repeated blocks again in the backward pass: less memory, more time.",
        ),
        click.option(
            "--objective",
            default="latency",
            show_default=True,
            metavar="latency|throughput",
            help="Time of one step, or largest device load when steps of many batches overlap.",
        ),
        click.option(
            "--ray",
            metavar="local|ADDRESS",
            help="Search on a Ray cluster, as auto or ray://host:10001; local: on one begun here.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(1),
            default=None,
            metavar="NUMBER",
            help="Searches side by side with --ray, each with the whole budget.",
        ),
        click.option(
            "--pin", multiple=True, metavar="PATTERN=DEVICE", help="As 'encoder.*=cuda:1'."
        ),
        click.option(
            "--pins-from",
            metavar="MAP.json",
            type=click.Path(path_type=Path),
            help="Pins of a device map, after those of --pin.",
        ),
        click.option(
            "--cpu",
            "uses_cpu",
            is_flag=True,
            help="Ops may go to CPUs beside GPUs, too.",
        ),
        *_STEP_OPTIONS,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def step_options(command: F) -> F:
    """What all commands take that capture a step."""
    for option in reversed(_STEP_OPTIONS):
        command = option(command)
    return command


def learning_options(command: F) -> F:
    """Of placers that learn."""
    options = [
        click.option(
            "--log-dir",
            type=click.Path(path_type=Path),
            help="Curves and checkpoints of placers that learn.",
        ),
        click.option(
            "--resume",
            is_flag=True,
            help="Go on from the checkpoint of the same run in --log-dir, if it has one.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def plan_options(command: F) -> F:
    """What all commands take that read a plan."""
    options = [
        click.option(
            "--machine", metavar="NAME|FILE", help="Default: the machine the plan was made for."
        ),
        click.option("--model", metavar="FILE:FUNCTION", help="In place of the one PLAN names."),
        click.option(
            "--trust", is_flag=True, help="Run the Python file PLAN names, wherever PLAN is from."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
