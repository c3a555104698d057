"""Benchmark rows: solved, checked, compared."""

import dataclasses
import json
import subprocess
import sys

import msgspec
import pytest

from devplace.bench import Effort, best_known, load_best_known, run, solve
from devplace.bench.answer import Answer, Split
from devplace.errors import InputError, VerificationError
from devplace.instances import Changes, fingerprint, load_instance, suites
from devplace.placers import Budget
from tests.instances import files

ENOUGH = Effort(Budget(seconds=20), threads=1)
"""For what ends with a proof, long before."""


def small(tmp_path, **changes):
    """The small Tarnawski instance."""
    return load_instance(files.write(tmp_path, "t.json", files.tarnawski(**changes)))


def test_small_instance_is_solved_to_its_optimum(tmp_path):
    """n7 and n3 together on one accelerator (4 + 0.5 out), n5 on the CPU."""
    instance = small(tmp_path, maxSizePerFPGA=100.0)
    row = solve(instance, ENOUGH)
    # apart: n3 takes n7's output (0.25), 2.5, sends 0.5 = 3.25; n7 sends 0.25 = 1.75
    assert row.value == 3.25
    assert row.best_known is None
    assert row.bound is not None
    assert row.bound <= row.value


def test_infeasible_is_a_status(tmp_path):
    """Without a CPU the third node has no home: proved, without a value."""
    row = solve(small(tmp_path, maxCPUs=0), ENOUGH)
    assert (row.status, row.value) == ("infeasible", None)
    assert row.why
    row = solve(small(tmp_path, maxCPUs=0, maxFPGAs=0), ENOUGH)
    assert (row.status, row.value) == ("infeasible", None)
    nodes = json.loads(files.tarnawski())["nodes"][:2]
    edges = json.loads(files.tarnawski())["edges"][:1]
    row = solve(small(tmp_path, maxCPUs=0, maxSizePerFPGA=39, nodes=nodes, edges=edges), ENOUGH)
    assert (row.status, row.value) == ("infeasible", None)


def test_rows_are_checked(tmp_path, monkeypatch):
    """A solver that breaks a rule, lies about its value or its bound is found out."""
    instance = small(tmp_path)
    for answer, what in (
        (Answer(Split((0, 0, 0)), "feasible"), "only a CPU runs it"),
        (Answer(Split((0, 1, 2)), "feasible", value=3.0), "is worth 3.0 ms, it is"),
        (Answer(Split((0, 1, 2)), "feasible", bound=4.0), "no solution of t is below 4.0"),
    ):
        monkeypatch.setattr(run, "solver", lambda *_, answer=answer: lambda *_: answer)
        with pytest.raises(VerificationError, match=what):
            solve(instance, ENOUGH)


@pytest.mark.parametrize(
    ("folder", "name", "value"),
    [
        ("LayerGraphs", "bert24_inference", 17.7899),
        ("LayerGraphs", "bert24_training", 41.7458),
        ("LayerGraphs", "resnet50_inference", 33.7747),
        ("OperatorGraphs", "bert_l-3_inference", 27.9186),
    ],
)
def test_contiguous_splits_have_their_published_values(folder, name, value):
    """The dynamic programme gives what the authors' gives."""
    path = files.PUBLIC / "tarnawski" / "throughput-inputs" / folder / f"{name}.json"
    row = solve(load_instance(path), ENOUGH, "contiguous")
    assert round(row.value, 4) == value
    assert row.bound is None


def test_greedy_latency_is_the_published_one():
    """Filling up accelerators in order: 100.219 ms on the layer graph."""
    path = files.PUBLIC / "tarnawski/latency-inputs/LayerGraphs/bert24_inference.json"
    row = solve(load_instance(path), ENOUGH, "greedy")
    assert row.value == pytest.approx(100.219, abs=5e-4)


def test_dataflow_is_solved_by_placers():
    """Any placer takes a DOPPLER graph; the search is at or below the best known value."""
    path = files.PUBLIC / "doppler" / "ffnn_192nodes.txt"
    effort = Effort(Budget(evaluations=20_000))
    known = load_best_known()
    instance = load_instance(path)
    best = known[fingerprint(instance)]
    row = solve(instance, effort, "search", best)
    assert row.value <= best.value + best.rounding
    assert solve(instance, effort, "single").value / 1e10 == pytest.approx(226.78, abs=5e-3)


def test_whole_suites_run_whatever_the_placer_supports():
    """Instances that a placer does not solve have a row that says so; none at all is an error."""
    instances = [load_instance(path) for path in suites.find("tarnawski")[:3]]
    rows = list(run.bench(instances, ENOUGH, "contiguous"))
    assert [row.status for row in rows] == ["unknown", "unknown", "feasible"]
    with pytest.raises(InputError, match="Known for it"):
        list(run.bench(instances, ENOUGH, "heft"))


def test_every_best_known_value_belongs_to_a_file():
    """Each entry's fingerprint is that of a public file as it is, or with the changes it names."""
    known = load_best_known()
    found = {fingerprint(load_instance(path)) for path in suites.find("public")}
    for row in known.values():
        if not row.changed:
            assert row.fingerprint in found, row.instance
    piper = Changes(devices=512, memory_bytes=8 * 2**30, bandwidth=25 * 2**30)
    (path,) = suites.find("piper")
    assert known[fingerprint(load_instance(path, changes=piper))].value == 0.00256113
    for row in known.values():
        assert row.bound is None or row.bound <= row.value + row.rounding


def test_only_better_values_are_recorded(tmp_path):
    """A value within the rounding of a published one is nothing new; a better bound is."""
    instance = small(tmp_path)
    first = best_known.improved(None, instance, 3.25, 3.0, "search", 7)
    assert (first.value, first.bound, first.seed, first.is_proved) == (3.25, 3.0, 7, False)
    published = msgspec.structs.replace(first, value=3.2504, rounding=5e-4)
    assert best_known.improved(published, instance, 3.25, 3.0, "search", 1) is None
    better = best_known.improved(published, instance, 3.249, None, "search", 1)
    assert (better.value, better.bound, better.rounding) == (3.249, 3.0, 0.0)
    proved = best_known.improved(first, instance, 3.25, 3.25, "search", 1)
    assert (proved.value, proved.is_proved, proved.seed) == (3.25, True, 7)
    path = tmp_path / "best.json"
    best_known.save_best_known([first], path)
    best_known.save_best_known([better], path)
    assert best_known.load_best_known(path) == {better.fingerprint: better}
    path.write_text("[{}]")
    with pytest.raises(InputError, match="damaged"):
        best_known.load_best_known(path)


def test_expert_needs_a_split(tmp_path):
    """Where there is none, the folder to look for is named."""
    with pytest.raises(InputError, match="human-experts"):
        solve(small(tmp_path), ENOUGH, "expert")


def test_gap_of_zero_bound(tmp_path):
    """A bound of 0 gives a gap only to a value of 0."""
    row = solve(small(tmp_path), ENOUGH)
    assert dataclasses.replace(row, bound=0.0).gap is None
    assert dataclasses.replace(row, bound=0.0, value=0.0).gap == 0.0


def test_numbers_too_far_apart_are_solved_without_a_proof(tmp_path):
    """One transfer is so large that the others round off: the value is the verifier's."""
    text = files.DOPPLER.replace("10,40,MatMul", "10.25,1e19,MatMul")
    effort = Effort(Budget(evaluations=200))
    row = solve(load_instance(files.write(tmp_path, "d.txt", text)), effort)
    assert row.status == "feasible"
    assert row.bound <= row.value


def test_numbers_that_floats_cannot_divide_are_refused(tmp_path):
    """5e-324 bytes of memory."""
    with pytest.raises(InputError, match="maxMemoryPerDevice: must be 0 or at least 1e-30"):
        load_instance(files.write(tmp_path, "p.json", files.piper(maxMemoryPerDevice=5e-324)))


@pytest.mark.parametrize("change", [{"threads": 0}, {"threads": 100_000}, {"seed": 2**31}])
def test_efforts_out_of_range_are_refused(change):
    """As threads that no system can start."""
    with pytest.raises(InputError, match="from"):
        Effort(Budget(seconds=1), **change)


def test_rows_of_two_processes_are_all_kept(tmp_path):
    """Whoever adds to the file of best values reads it under a lock."""
    code = (
        "import sys; from pathlib import Path\n"
        "from devplace.bench.best_known import BestKnown, save_best_known\n"
        "for k in range(40):\n"
        "    name = f'{sys.argv[1]}-{k}'\n"
        "    row = BestKnown(name, name, 'throughput', 'ms', 1.0, 'me', 'now')\n"
        "    save_best_known([row], Path(sys.argv[2]))\n"
    )
    path = tmp_path / "known.json"
    started = [subprocess.Popen([sys.executable, "-c", code, name, path]) for name in "ab"]
    assert [each.wait() for each in started] == [0, 0]
    assert len(load_best_known(path)) == 80
