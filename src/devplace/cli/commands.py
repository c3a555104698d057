"""The commands, and options that one of them has."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from devplace import __version__
from devplace.cli.options import (
    SEED,
    learning_options,
    plan_options,
    problem_options,
    step_options,
)
from devplace.cli.terminal import shows_control_characters
from devplace.errors import did_you_mean

if TYPE_CHECKING:
    from devplace.cli.planning import Outputs
    from devplace.cli.session import Given, PlanRequest
    from devplace.placers.ray_workers import RayWorkers


class _Group(click.Group):
    """Lists commands in the order of the work, not of the alphabet; ends as shells expect."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def main(self, *arguments: Any, **options: Any) -> Any:
        with shows_control_characters():
            return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise self._no_such_option(error) from None
        except BrokenPipeError:  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        except KeyboardInterrupt:
            click.echo("\nAborted!", err=True)
            ctx.exit(130)

    def _no_such_option(self, error: click.NoSuchOption) -> click.UsageError:
        """The error with what is meant: an option spelt much like it, or one of other commands."""
        own = _options_of(error.ctx.command) if error.ctx else set()
        name = error.option_name
        others = [f"`devplace {n}`" for n, c in self.commands.items() if name in _options_of(c)]
        verb = "have" if len(others) > 1 else "has"
        where = f" {', '.join(others)} {verb} it." if others else ""
        return click.UsageError(
            f"No such option {name!r}.{did_you_mean(name, own)}{where}", ctx=error.ctx
        )


def _options_of(command: click.Command) -> set[str]:
    """Names of a command's options, as they are written."""
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="devplace")
def devplace() -> None:
    """Plan, explain and run one PyTorch training step over several devices.

    \b
    Exit codes: 0 ok, 1 failed while running or writing, 2 bad input,
    3 infeasible, 4 verification failed, 5 plan does not match machine or
    model, 130 Ctrl-C.
    """


def _given(values: dict[str, Any]) -> Given:
    from devplace.cli.session import Given

    return Given(values["machine"], values["model"], values["trust"])


def _outputs(values: dict[str, Any]) -> Outputs:
    from devplace.cli.planning import Outputs

    return Outputs(values["output"], values["html"], values["log_dir"], values["resume"])


def _workers(values: dict[str, Any]) -> RayWorkers | None:
    from devplace.errors import InputError
    from devplace.placers.ray_workers import RayWorkers

    address, count = values["ray"], values["workers"]
    if (address is None) != (count is None):
        raise InputError(
            "--ray and --workers go together: as `--ray local --workers 4`, or the address of a "
            "cluster in place of local."
        )
    return None if address is None else RayWorkers(count, "" if address == "local" else address)


def _request(values: dict[str, Any]) -> PlanRequest:
    from devplace.cli.session import PlanRequest

    if values["pins_from"] is not None:
        pins = _pins_from(values["pins_from"], values["pin"])
        values = values | {"pin": (*values["pin"], *pins)}
    return PlanRequest.from_options(values)


def _pins_from(path: Path, given: tuple[str, ...]) -> list[str]:
    """The pins of a device map in a file, less those that are given besides."""
    from devplace.report import read_pins

    named = {text.rpartition("=")[0] for text in given}
    pins = read_pins(path)
    return [f"{pattern}={device}" for pattern, device in pins.items() if pattern not in named]


@devplace.command()
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and only that.")
def workloads(as_json: bool) -> None:
    """List the built-in models."""
    from devplace import workloads as room

    if as_json:
        _print_json([{"name": name, "about": room.describe(name)} for name in room.NAMES])
        return
    width = max(map(len, room.NAMES))
    for name in room.NAMES:
        click.echo(f"{name:{width}}  {room.describe(name)}")
    click.echo(
        "\nAny file.py:function that returns (model, inputs, loss_fn) works the same; one that "
        "returns (model, inputs) is an inference."
    )


@devplace.command(short_help="List known cards, or show a machine.")
@click.argument("name", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a machine file here.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and only that.")
def machines(name: str | None, output: Path | None, as_json: bool) -> None:
    """List known cards, or show a machine: cards as `rtx4090+rtx3090x2`, a file, or `detect`."""
    from devplace.cli import show

    if name is None:
        if output is not None:
            raise click.UsageError("-o writes the machine that is named. Name one, as in: h100x4.")
        show.machine_list(as_json)
    else:
        show.machine(name, output, as_json)


@devplace.command(short_help="Check and measure the links of this machine.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a machine file here.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and only that.")
def probe(output: Path | None, as_json: bool) -> None:
    """Check and measure the links of this machine; exit code 4 if any returns wrong data."""
    from devplace.cli import probing

    _show(probing.probe(output), as_json)


@devplace.command(short_help="Plan one training step, or an inference.")
@problem_options
@click.option(
    "--placer",
    default="search",
    show_default=True,
    metavar="NAME|FILE:FUNCTION",
    help="As search, layers or heft; FILE:FUNCTION makes one of yours.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan here.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with the timeline.")
@click.option(
    "--confirm", is_flag=True, help="Run the best few plans here and take the fastest measured."
)
@learning_options
def plan(**values: Any) -> None:
    """Plan one training step of MODEL (a workload, or a file.py:function that returns model, inputs
    and loss function), or an inference (one that returns model and inputs; .onnx, .pt2)."""
    from devplace.cli import planning

    outcome = planning.plan(
        _request(values),
        values["placer"],
        values["budget"],
        values["seed"],
        _outputs(values),
        values["confirm"],
        _workers(values),
    )
    _show(outcome, values["as_json"])


@devplace.command(short_help="Plan with several placers, and compare them.")
@problem_options
@click.option(
    "--placers",
    default="plain",
    show_default=True,
    metavar="a,b,...|plain|all",
    help="plain: all but those that learn, which take longer; FILE:FUNCTION makes one of yours.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the best plan here.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with the timeline.")
@learning_options
def compare(**values: Any) -> None:
    """Plan MODEL with several placers on the same budget, and compare them."""
    from devplace.cli import planning

    outcome = planning.compare(
        _request(values),
        values["placers"],
        values["budget"],
        values["seed"],
        _outputs(values),
        _workers(values),
    )
    _show(outcome, values["as_json"])


@devplace.command(short_help="Does a step fit, on how many GPUs, and what if not.")
@step_options
@click.option("--machine", metavar="NAME|FILE", help="Default: detect, or only those of --cards.")
@click.option(
    "--cards", default="", metavar="a100x2,rtx4090x4", help="Compare these machines, too."
)
def fit(as_json: bool, machine: str | None, cards: str, **values: Any) -> None:
    """Say whether a step of MODEL fits, on how many GPUs, and what it takes if not: blocks computed
    again, micro-batches, a smaller batch. From shapes alone: nothing is allocated or run."""
    from devplace.cli import fitting

    machines = [name.strip() for name in cards.split(",") if name.strip()]
    first = [machine or "detect"] if machine or not machines else []
    values |= {"machine": [*first, *machines][0], "pin": (), "pins_from": None}
    _show(fitting.fit(_request(values), [*first, *machines], values["seed"]), as_json)


@devplace.command(short_help="Solve published instances.")
@click.argument("specs", metavar="SUITE|FILE...", nargs=-1, required=True)
@click.option("--placer", default="search", show_default=True, help="As search or exact.")
@click.option("--budget", default="30s", show_default=True, help="For each instance.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**31 - 1),
    metavar="NUMBER",
    help="The same seed and evaluations give the same solutions.",
)
@click.option(
    "--threads",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="NUMBER",
    help="At most; with a budget in evaluations one is used.",
)
@click.option("--objective", default="", metavar="throughput|latency", help="Of Tarnawski files.")
@click.option("--devices", type=click.IntRange(min=0), help="Accelerators, in place of the file's.")
@click.option("--cpus", type=click.IntRange(min=0), help="CPUs, in place of the file's.")
@click.option("--memory", metavar="SIZE", help="Of each accelerator, as 8GiB.")
@click.option(
    "--edge-cost-scale", type=float, help="Factor on what crossing between devices costs."
)
@click.option("--bandwidth", type=float, help="Bytes/s between devices (PipeDream, Piper).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the solutions here.")
@click.option("--record", "records", is_flag=True, help="Keep better values as best known.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and only that.")
def bench(specs: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Solve published instances (suites tarnawski, pipedream, piper, doppler, or public for all;
    files; folders) and compare with the best values known. Every row is checked independently."""
    from devplace.cli import benching

    names = ("placer", "budget", "seed", "threads", "objective", "output", "records")
    changes = {name: value for name, value in values.items() if name not in names}
    chosen = {name: values[name] for name in names}
    _show(benching.run(specs, changes=changes, **chosen), as_json)


@devplace.command(short_help="Say where each module is and why.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@plan_options
@click.option("--device-map", is_flag=True, help="Only the map of modules to devices, as JSON.")
@click.option(
    "--split-points",
    is_flag=True,
    help="Only the modules at which a pipeline's stages begin, and their devices, as JSON.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="Write a page with the timeline; after a run, with what was measured.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and only that.")
def explain(
    plan_file: Path,
    device_map: bool,
    split_points: bool,
    html: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Say where PLAN puts each module and why, and what limits the step."""
    from devplace.cli import running

    if split_points:
        _print_json(running.split_points(plan_file, _given(values)))
        return
    outcome = running.explain(plan_file, _given(values), html)
    if device_map:
        outcome.print_map()
    else:
        _show(outcome, as_json)


@devplace.command(short_help="Run a plan and check it.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--steps",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="NUMBER",
    help="How many are run and compared.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=SEED,
    metavar="NUMBER",
    help="Of dropout and the like.",
)
@plan_options
@click.option("--deviations", is_flag=True, help="Where planned and measured times differ most.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and only that.")
def run(
    plan_file: Path, steps: int, seed: int, deviations: bool, as_json: bool, **values: Any
) -> None:
    """Run PLAN and check it against the unplaced step: on its GPUs, if they are in this computer
    and it was made for them, else on logical CPU devices."""
    from devplace.cli import running

    _show(running.run(plan_file, steps, seed, _given(values), deviations), as_json)


@devplace.command(short_help="Write a plan's timeline as a Chrome trace.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Write the timeline here, as trace.json.",
)
@plan_options
@click.option("--deviations", is_flag=True, help="Where planned and measured times differ most.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, and only that.")
def trace(plan_file: Path, output: Path, deviations: bool, as_json: bool, **values: Any) -> None:
    """Write PLAN's timeline as a Chrome trace; the measured one too, after a run."""
    from devplace.cli import tracing

    _show(tracing.trace(plan_file, output, _given(values), deviations), as_json)


def _show(outcome: Any, as_json: bool) -> None:
    """Print an outcome and leave with its exit code."""
    if as_json:
        _print_json(outcome.as_json())
    else:
        outcome.print()
    if outcome.exit_code:
        if outcome.complaint:
            click.echo(f"devplace: {' '.join(outcome.complaint.splitlines())}", err=True)
        sys.exit(outcome.exit_code)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
