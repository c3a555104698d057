"""Find the line of a field in TOML text, which the standard parser does not report."""

from __future__ import annotations

import re

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\"'.]+)\s*=")

Place = tuple[str, int, str]


def field_lines(text: str) -> dict[Place, int]:
    """Line number (from 1) of each `(table, index, key)`; key `""` is the table's header.

    The index counts entries of an array of tables from 0 and is 0 for plain tables; the top level
    is table `""`. A sub-table such as `[devices.flops]` counts as key `flops` of the entry above
    it, and its keys as `flops.KEY`. Keys in inline tables are not told apart.

    Example:
        >>> field_lines('name = "x"\\n[[devices]]\\nkind = "cpu"')[("devices", 0, "kind")]
        3
    """
    lines: dict[Place, int] = {}
    counts: dict[str, int] = {}
    table, prefix = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = _HEADER.match(line)
        key = _KEY.match(line)
        if header:
            table, _, sub = _clean(header.group(2)).partition(".")
            if header.group(1) == "[[" and not sub:
                counts[table] = counts.get(table, -1) + 1
            prefix = f"{sub}." if sub else ""
            lines.setdefault((table, counts.get(table, 0), sub), number)
        elif key:
            place = (table, counts.get(table, 0), prefix + _clean(key.group(1)))
            lines.setdefault(place, number)
    return lines


def _clean(key: str) -> str:
    return key.replace('"', "").replace("'", "").replace(" ", "")
