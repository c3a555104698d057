"""Dataflow graphs of DOPPLER (2026): a text file of numbers.

Line 1 is the number of nodes with the graph's inputs, line 2 the ops that read those inputs, lines
3 and 4 the producers and the consumers of the edges, then one line `compute,transfer[,kind]` per
op. The inputs themselves have no line: they are there from the start, on every device.

Source: Yao et al. (2026), "DOPPLER: Dual-Policy Learning for Device Assignment in Asynchronous
Dataflow Graphs", ICLR 2026, arXiv 2505.23131.
"""

from __future__ import annotations

from devplace.instances.records import About, DataflowInstance
from devplace.instances.text import check_acyclic, fail, not_negative

SOURCE = "Yao et al. (2026), DOPPLER, arXiv 2505.23131"
_HEAD = 4


def parse(text: str, about: About) -> DataflowInstance:
    """An instance from the text of its file.

    Raises:
        InputError: The file is malformed; names the line and the value.
    """
    path = about.path
    lines = [line.strip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    if len(lines) <= _HEAD:
        fail(path, f"line {len(lines)}", "the file ends before the first op", "Fetch it again.")
    count = _integers(path, 1, lines[0])
    inputs, producers, consumers = (_integers(path, k + 1, lines[k]) for k in range(1, _HEAD))
    rows = [_row(path, k, line) for k, line in enumerate(lines[_HEAD:], _HEAD + 1)]
    if len(count) != 1:
        fail(path, "line 1", f"expected the number of nodes, got {lines[0][:60]!r}")
    if len(rows) + len(inputs) != count[0]:
        problem = f"{count[0]} nodes, but {len(inputs)} inputs and {len(rows)} ops follow"
        fail(path, "line 1", problem, "Fetch the file again: lines are missing or too many.")
    if len(producers) != len(consumers):
        fail(path, "line 4", f"{len(consumers)} consumers for {len(producers)} producers")
    for line, ids in ((2, inputs), (3, producers), (4, consumers)):
        wrong = next((node for node in ids if not 0 <= node < len(rows)), None)
        if wrong is not None:
            fail(path, f"line {line}", f"there is no op {wrong}; ops are 0 to {len(rows) - 1}")
    edges = tuple(dict.fromkeys(zip(producers, consumers, strict=True)))
    check_acyclic(path, [str(k) for k in range(len(rows))], edges)
    compute, transfer, kinds = zip(*rows, strict=True)
    return DataflowInstance(about, compute, transfer, kinds, edges)


def _integers(path: str, number: int, line: str) -> list[int]:
    found = []
    for part in line.split(","):
        if not part.strip():
            continue
        try:
            found.append(int(part))
        except ValueError:
            fail(path, f"line {number}", f"expected whole numbers, got {part.strip()[:40]!r}")
    return found


def _row(path: str, number: int, line: str) -> tuple[float, float, str]:
    parts = [part.strip() for part in line.split(",", 2)]
    if len(parts) < 2:
        fail(path, f"line {number}", f"expected compute,transfer[,kind], got {line[:60]!r}")
    values = []
    for name, text in zip(("compute", "transfer"), parts, strict=False):
        try:
            value: float = int(text)
        except ValueError:
            try:
                value = float(text)
            except ValueError:
                fail(path, f"line {number}", f"{name} must be a number, got {text[:40]!r}")
        values.append(not_negative(path, f"line {number}, {name}", value))
    return values[0], values[1], parts[2] if len(parts) > 2 else ""
