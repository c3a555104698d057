"""Suites and where instances come from."""

import pytest

from devplace.errors import InputError
from devplace.instances import fingerprint, load_instance, suites
from tests.instances import files


def test_all_public_instances_are_read():
    """14 files, each with source and licence, no two with the same numbers."""
    found = [load_instance(path) for path in suites.find("public")]
    assert len(found) == 14
    assert len({fingerprint(instance) for instance in found}) == 14
    assert len({(instance.about.name, instance.objective) for instance in found}) == 14
    for instance in found:
        assert "github.com" in instance.about.source
        assert "MIT" in instance.about.licence or "CC BY 4.0" in instance.about.licence


def test_sizes_of_public_instances():
    """Nodes, edges and devices are the published ones."""
    expected = {
        "throughput-inputs/LayerGraphs/bert24_inference": (32, 55, 6),
        "throughput-inputs/LayerGraphs/bert24_training": (64, 110, 6),
        "throughput-inputs/LayerGraphs/resnet50_inference": (177, 193, 6),
        "throughput-inputs/OperatorGraphs/bert_l-3_inference": (235, 250, 3),
        "throughput-inputs/OperatorGraphs/bert_l-3_training": (600, 817, 3),
        "throughput-inputs/OperatorGraphs/resnet50_inference": (604, 619, 6),
    }
    for path in suites.find("tarnawski"):
        found = load_instance(path)
        if found.objective == "throughput":
            size = (len(found.nodes), len(found.edges), found.num_accelerators)
            assert size == expected.pop(found.about.name)
    assert not expected
    sizes = [
        (len(found.compute), len(found.edges))
        for found in map(load_instance, suites.find("doppler"))
    ]
    assert sizes == [(76, 80), (180, 208)]
    (piper,) = map(load_instance, suites.find("piper"))
    assert (len(piper.nodes), len(piper.edges)) == (37, 67)


def test_names_and_places(tmp_path, monkeypatch):
    """A file, a folder, a suite; nothing else, and a guess for the rest."""
    path = files.write(tmp_path, "x.json", files.tarnawski())
    files.write(tmp_path, "LICENSE.txt", "mine")
    assert suites.find(str(path)) == [path]
    assert suites.find(str(tmp_path)) == [path]
    with pytest.raises(InputError, match="Did you mean 'doppler'"):
        suites.find("doplper")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no instance files"):
        suites.find(str(empty))
    (tmp_path / "piper").mkdir()
    moved = files.write(tmp_path / "piper", "y.json", files.piper())
    monkeypatch.setenv(suites.FOLDER_VARIABLE, str(tmp_path))
    assert suites.find("piper") == [moved]


def test_fingerprint_is_of_numbers_only(tmp_path):
    """Names and places do not count, any number does."""
    first = load_instance(files.write(tmp_path, "a.json", files.tarnawski()))
    same = load_instance(files.write(tmp_path, "b.json", files.tarnawski(maxFPGAs=2)))
    other = load_instance(files.write(tmp_path, "c.json", files.tarnawski(maxFPGAs=3)))
    latency = load_instance(tmp_path / "a.json", "latency")
    assert fingerprint(first) == fingerprint(same)
    assert len({fingerprint(first), fingerprint(other), fingerprint(latency)}) == 3


def test_unknown_origin_is_said(tmp_path):
    """Without a SOURCE.txt the format's paper is named and the licence is unknown."""
    found = load_instance(files.write(tmp_path, "a.txt", files.DOPPLER))
    assert "2505.23131" in found.about.source
    assert found.about.licence.startswith("unknown")
