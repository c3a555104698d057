"""Graphs as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import random_graph

from devplace.errors import GraphError
from devplace.graph import Captured, OpGraph
from devplace.graph.serialize import fingerprint, from_json, load, save, to_json
from devplace.testing import hand_graph

GRAPH = hand_graph(
    """
    w = parameter bytes=8 module=fc
    a = aten.mm(w) bytes=8,4 flops=3 module=fc
    w2 = aten.add(w, a:0) bytes=8 stage=update replaces=w
    l = aten.sum(a:1) bytes=1 result=loss
    """
)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 60))
def test_a_graph_survives_its_file(seed: int, num_ops: int) -> None:
    """JSON there and back gives an equal graph with the same fingerprint and the same JSON."""
    graph = random_graph(np.random.default_rng(seed), num_ops)
    again = from_json(to_json(graph))
    assert again == graph
    assert fingerprint(again) == fingerprint(graph)
    assert to_json(again) == to_json(graph)


def test_save_and_load(tmp_path: Path) -> None:
    """A saved graph loads as it was, facts of the capture included; what runs it is left out."""
    facts = {"optimizer": "SGD", "micro_batches": 2}
    program: Any = object()
    graph = Captured(GRAPH.name, GRAPH.ops, GRAPH.tensors, GRAPH.results, facts, program=program)
    save(graph, tmp_path / "g.json")
    loaded = load(tmp_path / "g.json")
    assert loaded == graph
    assert not isinstance(loaded, Captured)


@pytest.mark.slow
def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """Cut at any byte, a graph file is a GraphError that names the file."""
    whole = to_json(GRAPH)
    for length in range(len(whole)):
        (tmp_path / "g.json").write_bytes(whole[:length])
        with pytest.raises(GraphError, match=r"g\.json is not a devplace graph"):
            load(tmp_path / "g.json")


def edited(**changes: Any) -> bytes:
    """The graph's file with changes; None removes a field."""
    data = json.loads(to_json(GRAPH)) | changes
    return json.dumps({k: v for k, v in data.items() if v is not None}).encode()


@pytest.mark.parametrize("name", ["format", "version", "name", "ops", "tensors", "results", "meta"])
@pytest.mark.parametrize("value", [None, 7, "text", [7], {"a": 1}], ids=repr)
def test_edited_files_are_refused(name: str, value: Any) -> None:
    """Every field removed or of another type is a GraphError (name and meta take any of theirs)."""
    if (name, type(value)) in (("name", str), ("meta", dict)):
        assert from_json(edited(**{name: value}))
        return
    with pytest.raises(GraphError):
        from_json(edited(**{name: value}))


def test_files_that_hang_together_badly_are_refused() -> None:
    """Unknown fields, roles and stages, and dangling references are GraphErrors."""
    ops = json.loads(to_json(GRAPH))["ops"]
    for change in ({"stage": "sideways"}, {"role": "king"}, {"inputs": [99]}, {"flops": 2**70}):
        with pytest.raises(GraphError):
            from_json(edited(ops=[*ops[:1], ops[1] | change, *ops[2:]]))
    with pytest.raises(GraphError, match="extra"):
        from_json(edited(extra=1))
    with pytest.raises(GraphError, match="version 99"):
        from_json(edited(version=99))
    with pytest.raises(GraphError, match="No such file"):
        load("no/such/file.json")


@pytest.mark.parametrize(
    "text",
    [
        "w = parameter bytes=8\na = aten.mm(w) bytes=9 result=output",
        "w = parameter bytes=8\na = aten.bmm(w) bytes=8 result=output",
        "w = parameter bytes=8\na = aten.mm(w, w) bytes=8 result=output",
        "w = parameter bytes=8\nb = aten.mm(w) bytes=8 result=output",
        "w = buffer bytes=8\na = aten.mm(w) bytes=8 result=output",
        "w = parameter bytes=8\na = aten.mm(w) bytes=8",
    ],
)
def test_the_fingerprint_tells_steps_apart(text: str) -> None:
    """Another size, target, edge, name, role or result gives another fingerprint."""
    graph = hand_graph("w = parameter bytes=8\na = aten.mm(w) bytes=8 result=output")
    assert fingerprint(hand_graph(text)) != fingerprint(graph)


def test_the_fingerprint_ignores_where_the_code_is() -> None:
    """Source files, the model's name and the capture's facts do not count."""
    ops = tuple(msgspec.structs.replace(op, source_line="other.py:7") for op in GRAPH.ops)
    moved = OpGraph("renamed", ops, GRAPH.tensors, GRAPH.results, {"torch": "9.9"})
    assert fingerprint(moved) == fingerprint(GRAPH)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Neither writing nor reading ends in a traceback."""
    missing = tmp_path / "nowhere" / "graph.json"
    with pytest.raises(GraphError, match=r"Cannot write graph .*nowhere"):
        save(GRAPH, missing)
    with pytest.raises(GraphError, match=r"Cannot read graph .*nowhere"):
        load(missing)
