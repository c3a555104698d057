"""Machine files: a `Machine` as TOML that people write, read back with line numbers in errors."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from devplace.device_kinds import find_kind, kind_names, names_kind
from devplace.errors import MachineError, did_you_mean
from devplace.files import read_whole
from devplace.machine.machine import (
    RATE_DTYPES,
    Device,
    Link,
    Machine,
    Pool,
    unknown_dtype,
)
from devplace.machine.quantity import (
    BANDWIDTHS,
    FLOP_RATES,
    SIZES,
    TIMES,
    format_quantity,
    parse_quantity,
)
from devplace.machine.toml_lines import Place, field_lines

Parser = Callable[[Any, str], Any]
MAX_BYTES = 10**8
"""Size of the largest machine file; one of 64 devices with all links has 1 MB."""


def _of_type(value: Any, what: str, kind: type, example: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MachineError(f"{what} must be {example}, got {value!r}.")
    return value


def _texts(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise MachineError(f'{what} must be a list of texts such as ["a", "b"], got {value!r}.')
    return tuple(value)


def _rates(value: Any, what: str) -> dict[str, int]:
    if not isinstance(value, dict):
        return {"float32": parse_quantity(value, FLOP_RATES, what)}
    if "float32" not in value:
        raise MachineError(f"{what} must have a 'float32' rate. Measure it or set it.")
    for dtype in value:
        if dtype not in RATE_DTYPES:
            raise MachineError(unknown_dtype(f"{what}.{dtype}", dtype))
    return {d: parse_quantity(rate, FLOP_RATES, f"{what}.{d}") for d, rate in value.items()}


def _share(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise MachineError(f"{what} must be from 0 to 1, got {value!r}.")
    return float(value)


def _points(value: Any, what: str) -> tuple[tuple[int, int], ...]:
    pairs = isinstance(value, list) and all(isinstance(p, list) and len(p) == 2 for p in value)
    if not pairs:
        raise MachineError(
            f'{what} must be a list of sizes and times such as [["1 MiB", "8 us"]], got {value!r}.'
        )
    amount, span = partial(parse_quantity, units=SIZES), partial(parse_quantity, units=TIMES)
    return tuple(
        (amount(p[0], what=what, positive=False), span(p[1], what=what, positive=False))
        for p in value
    )


def _kind(value: Any, what: str) -> str:
    if not names_kind(value):
        raise MachineError(f"{what} must be {kind_names()}, got {value!r}.")
    return str(value)


_text = partial(_of_type, kind=str, example="a text")
_flag = partial(_of_type, kind=bool, example="true or false")
_count = partial(_of_type, kind=int, example="a whole number")
_size = partial(parse_quantity, units=SIZES)
_amount = partial(parse_quantity, units=SIZES, positive=False)
_bandwidth = partial(parse_quantity, units=BANDWIDTHS)
_time = partial(parse_quantity, units=TIMES, positive=False)


def _call(parser: Any) -> Parser:
    return lambda value, what: parser(value, what=what)


# Field in the file -> (field of the record, which is accepted as well, and how it is read).
_DEVICE: dict[str, tuple[str, Parser]] = {
    "name": ("name", _call(_text)),
    "kind": ("kind", _kind),
    "model": ("model", _call(_text)),
    "memory": ("memory_bytes", _call(_size)),
    "reserve": ("reserve_bytes", _call(_amount)),
    "limit": ("limit_bytes", _call(_size)),
    "bandwidth": ("bytes_per_s", _call(_bandwidth)),
    "flops": ("flops_per_s", _rates),
    "launch_gap": ("launch_gap_ns", _call(_time)),
    "streams": ("streams", _call(_count)),
    "pool": ("pool", _call(_text)),
    "unsupported_ops": ("unsupported_ops", _texts),
    "uuid": ("uuid", _call(_text)),
    "host": ("host", _call(_text)),
}
_LINK: dict[str, tuple[str, Parser]] = {
    "src": ("src", _call(_text)),
    "dst": ("dst", _call(_text)),
    "both": ("both", _call(_flag)),
    "bandwidth": ("bytes_per_s", _call(_bandwidth)),
    "latency": ("latency_ns", _call(_time)),
    "channels": ("channels", _texts),
    "usable": ("usable", _call(_flag)),
    "send_overhead": ("send_overhead_ns", _call(_time)),
    "receive_overhead": ("receive_overhead_ns", _call(_time)),
    "send_share": ("send_share", _share),
    "receive_share": ("receive_share", _share),
    "points": ("points", _points),
    "engine_from": ("engine_bytes", _call(_amount)),
    "parallel": ("parallel", _call(_flag)),
}
_POOL: dict[str, tuple[str, Parser]] = {
    "name": ("name", _call(_text)),
    "memory": ("memory_bytes", _call(_size)),
}
_TOP = ("name", "sources", "devices", "links", "pools")
_REQUIRED = {
    "devices": ("name", "memory", "flops", "bandwidth"),
    "links": ("src", "dst", "bandwidth"),
    "pools": ("name", "memory"),
}


def load(path: str | Path) -> Machine:
    """Read a machine file.

    Raises:
        MachineError: Unreadable file or a wrong field, as `FILE:LINE: FIELD ...`.
    """
    file = Path(path)
    try:
        text = read_whole(file, MAX_BYTES).decode("utf-8-sig")  # as some editors write it
    except (OSError, ValueError) as error:
        is_text = not isinstance(error, UnicodeError)
        reason = (getattr(error, "strerror", None) or error) if is_text else "it is not UTF-8 text"
        raise MachineError(
            f"Cannot read machine file {str(path)!r}: {reason}. Check the path; `devplace machines "
            f"NAME -o FILE` writes one to edit."
        ) from None
    return loads(text, str(path))


def loads(text: str, file: str = "machine.toml") -> Machine:
    """Read a machine from text; `file` is its name in messages and, without folder, its default.

    Raises:
        MachineError: A wrong field, as `FILE:LINE: FIELD ...`.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = f":{found.group(1)}" if found else f":{len(text.splitlines())}"
        reason = re.sub(r" \(at .*\)", "", str(error))
        raise MachineError(f"{file}{line}: not valid TOML: {reason}.") from None
    except RecursionError:
        raise MachineError(f"{file}: not valid TOML: it is nested too deeply.") from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise MachineError(f"{file}: not valid TOML: {error}.") from None
    return _Reader(file, field_lines(text), data).machine()


class _Reader:
    """Turns parsed TOML into records; errors carry file and line."""

    def __init__(self, file: str, lines: dict[Place, int], data: dict[str, Any]) -> None:
        self.file = file
        self.lines = lines
        self.data = data

    def machine(self) -> Machine:
        for key in self.data:
            if key not in _TOP:
                raise self.error("", 0, key, self.unknown(f"field {key!r}", key, _TOP))
        pools = tuple(Pool(**fields) for fields in self.entries("pools", _POOL))
        devices = tuple(self.device(i, f) for i, f in enumerate(self.entries("devices", _DEVICE)))
        self.check_names(devices, pools)
        names = tuple(device.name for device in devices)
        found = self.entries("links", _LINK)
        links = tuple(
            link for i, fields in enumerate(found) for link in self.links(i, fields, names)
        )
        name, sources = self.top_text("name", Path(self.file).stem), self.sources()
        try:
            return Machine(name, devices, links, pools, sources)
        except MachineError as error:
            raise MachineError(f"{self.file}: {error}") from None

    def error(self, table: str, index: int, key: str, message: str, at: str = "") -> MachineError:
        """An error at the line of a field, or of the entry that lacks it."""
        place = self.lines.get((table, index, at or key)) or self.lines.get((table, index, key))
        line = place or self.lines.get((table or key, index, "")) or self.lines.get(("", 0, table))
        return MachineError(f"{self.file}{f':{line}' if line else ''}: {message}")

    @staticmethod
    def unknown(what: str, name: str, known: tuple[str, ...]) -> str:
        listed = ", ".join(known) or "none is given"
        return f"unknown {what}.{did_you_mean(name, known)} Known: {listed}."

    def top_text(self, key: str, default: str) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.error("", 0, key, f"{key} must be a text, got {value!r}.")
        return value

    def sources(self) -> dict[str, str]:
        value = self.data.get("sources", {})
        if not isinstance(value, dict) or not all(isinstance(t, str) for t in value.values()):
            raise self.error("sources", 0, "", "sources must be a table of texts.")
        return value

    def entries(self, table: str, fields: Mapping[str, tuple[str, Parser]]) -> list[dict[str, Any]]:
        rows = self.data.get(table, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            message = f"{table} must be written as [[{table}]] entries."
            raise self.error(table, 0, "", message)
        return [self.entry(table, index, row, fields) for index, row in enumerate(rows)]

    def entry(
        self, table: str, index: int, row: dict[str, Any], fields: Mapping[str, tuple[str, Parser]]
    ) -> dict[str, Any]:
        names = {record: key for key, (record, _) in fields.items()} | {key: key for key in fields}
        result: dict[str, Any] = {}
        for key, value in row.items():
            what = f"{table}[{index}].{key}"
            if key not in names:
                message = self.unknown(f"field {what}", key, tuple(fields))
                raise self.error(table, index, key, message)
            record, parser = fields[names[key]]
            if record in result:
                raise self.error(table, index, key, f"{what} is given twice, under two names.")
            try:
                result[record] = parser(value, what)
            except MachineError as error:
                raise self.error(table, index, key, str(error), self.inner(what, error)) from None
        for key in _REQUIRED[table]:
            if fields[key][0] not in result:
                owner = f"{table}[{index}]" + (f" ({row['name']})" if "name" in row else "")
                message = f"{owner} needs a field {key!r}. Measure it or set it."
                raise self.error(table, index, "", message)
        return result

    @staticmethod
    def inner(what: str, error: MachineError) -> str:
        """`flops.float16` when the message is about that part of a sub-table."""
        dotted = str(error).split(" ", 1)[0]
        return dotted.split("].", 1)[-1] if dotted.startswith(f"{what}.") else ""

    def device(self, index: int, fields: dict[str, Any]) -> Device:
        name = fields["name"]
        if "kind" not in fields:
            kind = find_kind(name)
            if kind is None:
                message = f"devices[{index}] ({name}) needs a field 'kind': {kind_names()}."
                raise self.error("devices", index, "", message)
            fields["kind"] = kind.name
        if fields.get("streams", 1) < 1:
            message = f"devices[{index}].streams must be positive, got {fields['streams']}."
            raise self.error("devices", index, "streams", message)
        limit = fields.pop("limit_bytes", None)
        if limit is not None:
            self.apply_limit(index, fields, limit)
        return Device(**fields)

    def apply_limit(self, index: int, fields: dict[str, Any], limit: int) -> None:
        memory = fields["memory_bytes"]
        if "reserve_bytes" in fields:
            message = f"devices[{index}] has both 'limit' and 'reserve'. Keep one."
            raise self.error("devices", index, "limit", message)
        if limit > memory:
            shown = format_quantity(limit, SIZES), format_quantity(memory, SIZES)
            message = (
                f"devices[{index}].limit must be at most its memory, got {shown[0]} of {shown[1]}."
            )
            raise self.error("devices", index, "limit", message)
        fields["reserve_bytes"] = memory - limit

    def check_names(self, devices: tuple[Device, ...], pools: tuple[Pool, ...]) -> None:
        pool_names = tuple(pool.name for pool in pools)
        for table, names in (("devices", [d.name for d in devices]), ("pools", pool_names)):
            for index, name in enumerate(names):
                if name in names[:index]:
                    message = f"{table}[{index}].name must be unique: {name!r} occurs twice."
                    raise self.error(table, index, "name", message)
        for index, device in enumerate(devices):
            if device.pool and device.pool not in pool_names:
                what = f"pool {device.pool!r} in devices[{index}].pool"
                message = self.unknown(what, device.pool, pool_names)
                raise self.error("devices", index, "pool", message)

    def links(self, index: int, fields: dict[str, Any], names: tuple[str, ...]) -> tuple[Link, ...]:
        for key in ("src", "dst"):
            if fields[key] not in names:
                what = f"device {fields[key]!r} in links[{index}].{key}"
                raise self.error("links", index, key, self.unknown(what, fields[key], names))
        if fields["src"] == fields["dst"]:
            message = f"links[{index}] must join two devices, got {fields['src']!r} twice."
            raise self.error("links", index, "dst", message)
        both = fields.pop("both", False)
        link = Link(**fields)
        if not both:
            return (link,)
        return link, Link(**{**fields, "src": link.dst, "dst": link.src})


def dumps(machine: Machine) -> str:
    """The machine as a machine file; `loads` reads back an equal machine."""
    parts = [f"name = {_quote(machine.name)}\n"]
    if machine.sources:
        rows = [f"{_key(topic)} = {_quote(text)}" for topic, text in machine.sources.items()]
        parts.append("\n".join(["[sources]", *rows, ""]))
    parts += [_entry("pools", pool, _POOL) for pool in machine.pools]
    parts += [_entry("devices", device, _DEVICE) for device in machine.devices]
    parts += [_entry("links", link, _LINK) for link in machine.links]
    return "\n".join(parts)


_DEFAULTS: dict[str, Any] = {
    "model": "",
    "reserve_bytes": 0,
    "launch_gap_ns": 0,
    "streams": 1,
    "pool": "",
    "unsupported_ops": (),
    "uuid": "",
    "host": "",
    "latency_ns": 0,
    "channels": (),
    "usable": True,
    "send_overhead_ns": 0,
    "receive_overhead_ns": 0,
    "send_share": 0.0,
    "receive_share": 0.0,
    "points": (),
    "engine_bytes": 0,
    "parallel": False,
}
_UNITS = {
    "memory": SIZES,
    "reserve": SIZES,
    "bandwidth": BANDWIDTHS,
    "launch_gap": TIMES,
    "latency": TIMES,
    "send_overhead": TIMES,
    "receive_overhead": TIMES,
    "engine_from": SIZES,
}


def _entry(
    table: str, record: Device | Link | Pool, fields: Mapping[str, tuple[str, Parser]]
) -> str:
    rows = [f"[[{table}]]"]
    for key, (name, _) in fields.items():
        value = getattr(record, name, None)
        if value is None or value == _DEFAULTS.get(name):
            continue
        if key in _UNITS:
            value = format_quantity(value, _UNITS[key])
        rows.append(f"{key} = {_value(value)}")
    return "\n".join([*rows, ""])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        rates = (f"{_key(k)} = {_value(format_quantity(v, FLOP_RATES))}" for k, v in value.items())
        return "{ " + ", ".join(rates) + " }"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        pairs = ((format_quantity(a, SIZES), format_quantity(b, TIMES)) for a, b in value)
        return "[" + ", ".join(f"[{_value(a)}, {_value(b)}]" for a, b in pairs) + "]"
    if isinstance(value, tuple):
        return "[" + ", ".join(_quote(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quote(value) if isinstance(value, str) else str(value)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quote(key)
