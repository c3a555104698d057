"""Tables of fused steps beside torch.compile and others, from what `experiments.gpu.fused` wrote.

Run: `python experiments/fused_tables.py FOLDER ... [--keep] [--note TEXT ...]`: writes
docs/results/gpu_fused.json and .md; with --keep the runs that are there stay. Only what was
measured on one machine at one commit, a run, is compared; of a row that was timed several times in
a run the last one counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS

MADE = ("card", "cards", "uuid", "cores", "driver", "torch", "cuda", "python", "seed", "commit")
"""What a line says of where and with what it was measured."""
EMPTY = 4
"""Lines of a table without rows."""
OURS = ("fused", "plain")
GROUPS = {
    "DDP": ("ddp-compiled", "ddp-graphs"),
    "FSDP2": ("fsdp-compiled", "fsdp-mixed-compiled"),
    "pipeline": ("1f1b-2-compiled", "1f1b-4-compiled", "1f1b-8-compiled"),
}
WAYS = {
    "ddp-compiled": "default",
    "ddp-graphs": "reduce-overhead",
    "fsdp-compiled": "fp32 traffic",
    "fsdp-mixed-compiled": "bf16 policy",
    "1f1b-2-compiled": "1F1B, 2",
    "1f1b-4-compiled": "1F1B, 4",
    "1f1b-8-compiled": "1F1B, 8",
}
Found = dict[str, dict[str, Any]]
"""Peer -> what it took for one row in one run."""


def collect(
    folders: list[Path], notes: list[str], before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """All lines of some folders as one result, added to one of before; machines and commits are
    said once each."""
    lines: dict[tuple[str, str, int], dict[str, Any]] = {}
    compile_s: dict[tuple[str, str], float] = {}
    runs: list[dict[str, Any]] = []
    fresh: set[int] = set()
    if before is not None:
        runs, notes = before["runs"], [*before["notes"], *notes]
        lines = {(line["row"], line["peer"], line["run"]): line for line in before["rows"]}
    for folder in folders:
        for text in (folder / "fused.jsonl").read_text().splitlines():
            line = json.loads(text)
            for long in ("kernels", "log"):
                line.pop(long, None)
            key = (line["row"], line["peer"])
            compile_s[key] = max(compile_s.get(key, 0.0), _compile_s(line) or 0.0)
            if line.pop("pass") == "warm":
                continue
            made = {name: line.pop(name) for name in MADE}
            if made not in runs:
                runs.append(made)
            place = (*key, runs.index(made))
            fresh.add(place[2])
            if "ms" in line or place not in lines:
                lines[place] = line | {"run": place[2]}
    for (row, peer, run), line in lines.items():
        if run in fresh and compile_s.get((row, peer)):
            line["kernels_s" if peer in OURS else "compile_s"] = compile_s[row, peer]
    return {"runs": runs, "notes": notes, "rows": list(lines.values())}


def gpu_fused(data: dict[str, Any]) -> str:
    """Fused steps on one GPU and on two, beside what others do."""
    entries = _entries(data["rows"])
    lines = [
        "# Fused steps beside torch.compile",
        "",
        "Milliseconds per training step: median over rounds of steps that are not waited for one "
        "by one, timed by the host's clock, each in a process of its own that has the GPUs alone. "
        "fp32 with TF32 products, or bf16 autocast with parameters in fp32. torch.compile: loss "
        "and backward compiled, with the fastest of torch's default, its fused and a compiled "
        "update. Memory is the most that torch's allocator reserved. Written by `python -m "
        "experiments.gpu.fused`.",
        "",
        *(f"- Run {number}: {_made(made)}." for number, made in enumerate(data["runs"])),
        *(f"- {note}" for note in data["notes"]),
        "",
        *_one_gpu(_whole(entries, "")),
        *_two_gpus(_whole(entries, "-2")),
        *_missing(data["rows"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _entries(rows: list[dict[str, Any]]) -> list[Found]:
    """What belongs together: one row in one run; rows in their first order, runs in turn."""
    names = list(dict.fromkeys(line["row"] for line in rows))
    by_both: dict[tuple[int, int], Found] = {}
    for line in rows:
        both = names.index(line["row"]), line["run"]
        by_both.setdefault(both, {})[line["peer"]] = line
    return [by_both[both] for both in sorted(by_both)]


def _whole(entries: list[Found], suffix: str) -> list[Found]:
    """Entries with our figure and torch.compile's, or those of peers on the same GPUs; of a row
    without such, all that it has."""
    of_row: dict[str, list[Found]] = {}
    for entry in entries:
        of_row.setdefault(next(iter(entry.values()))["row"], []).append(entry)
    kept = []
    for some in of_row.values():
        whole = [
            entry
            for entry in some
            if (_ours(entry, suffix) and _get(entry, "compile"))
            or (suffix and any(_best(entry, peers) for peers in GROUPS.values()))
        ]
        kept += whole or some
    return kept


def _made(made: dict[str, Any]) -> str:
    return (
        f"{made['cards']} x {made['card']}, {made['cores']} cores, driver {made['driver']}, torch "
        f"{made['torch']}, CUDA {made['cuda']}, Python {made['python']}, seed {made['seed']}, "
        f"commit {made['commit']}"
    )


def _one_gpu(entries: list[Found]) -> list[str]:
    """Ours and torch.compile on one GPU; the fastest in bold."""
    head = "| step | run | ours | reduce-overhead | max-autotune | of reduce-overhead | predicted |"
    lines = ["## One GPU", "", head + " ours, GB | torch.compile, GB | compiling, s |"]
    lines.append("|---" * 10 + "|")
    for found in entries:
        ours = _ours(found, "")
        compiled, tuned = (_get(found, peer) for peer in ("compile", "autotune"))
        if not (ours or compiled or tuned):
            continue
        times = [_ms(each) for each in (ours, compiled, tuned)]
        least = min((ms for ms in times if ms is not None), default=None)
        cells = [_bold(ms, least) for ms in times]
        lines.append(
            f"| {_step(ours or compiled or tuned)} | {' | '.join(cells)} | "
            f"{_ratio(times[0], times[1])} | {_number(ours.get('predicted_ms'))} | {_gb(ours)} | "
            f"{_gb(compiled)} | {_compiling(ours, compiled, tuned)} |"
        )
    shown = [*lines, "", "*compiling*: ours, reduce-overhead, max-autotune.", ""]
    return shown if len(lines) > EMPTY else []


def _two_gpus(entries: list[Found]) -> list[str]:
    """Our plan on two GPUs beside what others do on the same two; the fastest in bold."""
    head = "| step | run | ours, 2 GPUs | micro-batches | predicted | of torch.compile, 1 GPU |"
    lines = ["## Two GPUs", "", f"{head} torch.compile, 1 GPU | {' | '.join(GROUPS)} |"]
    lines.append("|---" * 10 + "|")
    for found in entries:
        ours, compiled = _ours(found, "-2"), _get(found, "compile")
        others = [_best(found, peers) for peers in GROUPS.values()]
        if not (ours or any(others)):
            continue
        times = [_ms(each) for each in (ours, compiled, *others)]
        least = min((ms for ms in times if ms is not None), default=None)
        first, alone, *cells = (_bold(ms, least) for ms in times)
        ways = [WAYS.get(other.get("peer", ""), "") for other in others]
        shown = [f"{a} ({b})" if a and b else a for a, b in zip(cells, ways, strict=True)]
        lines.append(
            f"| {_step(ours or compiled or next(filter(None, others)))} | "
            f"{first} | {ours.get('micro_batches', '')} | {_number(ours.get('predicted_ms'))} | "
            f"{_ratio(times[0], times[1])} | {alone} | {' | '.join(shown)} |"
        )
    return [*lines, ""] if len(lines) > EMPTY else []


def _missing(rows: list[dict[str, Any]]) -> list[str]:
    """What was tried and gave no time, with the reason."""
    lines = [
        f"- {line['row']}, {line['peer']}, run {line['run']}: {line.get('reason', 'no plan ran')}"
        for line in rows
        if "ms" not in line
    ]
    return ["## Not measured", "", *lines, ""] if lines else []


def _get(found: Found, peer: str) -> dict[str, Any]:
    """A row that was timed; empty if there is none."""
    line = found.get(peer, {})
    return line if "ms" in line else {}


def _ours(found: Found, suffix: str) -> dict[str, Any]:
    """Our row, fused if there is one."""
    return next((line for o in OURS if (line := _get(found, o + suffix))), {})


def _best(found: Found, peers: tuple[str, ...]) -> dict[str, Any]:
    """The fastest of some ways."""
    timed = [line for peer in peers if (line := _get(found, peer))]
    return min(timed, key=lambda line: float(line["ms"]), default={})


def _step(line: dict[str, Any]) -> str:
    """What is trained, in words, and the run."""
    optimizer = ", AdamW" if line["optimizer"] == "adamw" else ""
    return (
        f"{line['workload']}, batch {line['batch']}, {line['number_format']}{optimizer} | "
        f"{line['run']}"
    )


def _ms(line: dict[str, Any]) -> float | None:
    return line.get("ms")


def _number(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.1f}"


def _bold(ms: float | None, least: float | None) -> str:
    return f"**{ms:.1f}**" if ms is not None and ms == least else _number(ms)


def _ratio(ours: float | None, other: float | None) -> str:
    return "" if ours is None or other is None else f"{ours / other:.2f}"


def _gb(line: dict[str, Any]) -> str:
    """Most memory on one GPU, GB."""
    most = max(line.get("reserved_bytes") or [0])
    return f"{most / 1e9:.1f}" if most else ""


def _compiling(*lines: dict[str, Any]) -> str:
    """Seconds of compiling, in the pass that compiled."""
    values = map(_compile_s, lines)
    return ", ".join("-" if value is None else f"{value:.0f}" for value in values)


def _compile_s(line: dict[str, Any]) -> float | None:
    """Seconds of compiling; ours are those of making kernels, before they were told apart those of
    pricing."""
    if line.get("peer") not in OURS:
        return line.get("compile_s")
    seconds = line.get("seconds", {}).get("1", {})
    return line.get("kernels_s", seconds.get("kernels", seconds.get("profile")))


def main() -> None:
    """Write the result and its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--keep", action="store_true", help="add to the runs that are there")
    options = parser.parse_args()
    kept = options.out / "gpu_fused.json"
    before = json.loads(kept.read_text()) if options.keep else None
    data = collect(options.folders, options.note, before)
    (options.out / "gpu_fused.json").write_text(json.dumps(data, indent=1) + "\n")
    (options.out / "gpu_fused.md").write_text(gpu_fused(data))


if __name__ == "__main__":
    main()
