"""What is said of a step beside its times."""

from __future__ import annotations

import dataclasses

import pytest

from devplace.auto import step_notes as module
from tests.tune.steps import captured, placed


@pytest.mark.parametrize(("cores", "is_noted"), [(1, True), (2, False), (8, False)])
def test_fewer_cores_than_gpus_are_noted(
    cores: int, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each GPU is fed by a thread; CPU devices, and GPUs that run nothing, need none of them."""
    monkeypatch.setattr(module, "num_cores", lambda: cores)
    graph, *_ = captured()
    plan = placed(graph).plan
    names = ("cpu:0", "cuda:0", "cuda:1", "cuda:2")
    on_two = tuple(k % 3 for k in range(len(plan.placement)))
    notes = module.few_cores(dataclasses.replace(plan, placement=on_two, device_names=names))
    assert bool(notes) == is_noted
    assert all("each of 2 GPUs" in note and "1 core:" in note for note in notes)
    assert module.few_cores(plan) == ()
