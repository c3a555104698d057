"""One run makes both tables."""

from __future__ import annotations

from experiments.gpu.baselines import GLOBAL_BATCH
from experiments.gpu.table import LARGE, core_sets, steps


def test_undivided_batches_come_first() -> None:
    """In the order of names, rows of a step begin with the one that the others are compared to."""
    found = steps([2, 4])
    assert len(found) == 22
    for start in ("table2-bert-large-", "table2-gpt-2-", "bert12-"):
        names = sorted(name for name in found if name.startswith(start))
        assert found[names[0]][found[names[0]].index("--micro-batches") + 1] == "1"


def test_the_second_table_uses_all_gpus_and_one_batch() -> None:
    """Its steps have the global batch and the largest number of GPUs."""
    for name, arguments in steps([2, 4]).items():
        wanted = "4" if name.startswith("table2") else "2,4"
        assert arguments[arguments.index("--gpus") + 1] == wanted
        if name.startswith("table2"):
            assert arguments[arguments.index("--batch") + 1] == str(GLOBAL_BATCH)


def test_nothing_runs_on_the_cores_that_measure() -> None:
    """With cores enough every process has its own share; with few they share, but not those."""
    measuring, *own = core_sets(range(64), 4, [2, 1, 1, 2] * 4)
    assert len(measuring) == 8
    assert [len(cores) for cores in own] == [4, 2, 2, 4] * 4
    taken = [core for cores in (measuring, *own) for core in cores]
    assert len(taken) == len(set(taken)) == 8 + 48
    measuring, *own = core_sets(range(8), 2, [1] * 19)
    assert all(own)
    assert not {core for cores in own for core in cores} & set(measuring)
    assert [*core_sets([5], 2, [2, 1])] == [[5], [5], [5]]


def test_every_large_step_is_one() -> None:
    """Names of steps that get more cores are names of steps."""
    assert set(LARGE) <= set(steps([2, 4]))
