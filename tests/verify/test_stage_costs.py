"""Stages of PipeDream and Piper by hand."""

import dataclasses

import pytest

from devplace.instances import load_instance
from devplace.verify import Stage, verify_pipeline, verify_variants
from tests.instances import files


@pytest.fixture
def profile(tmp_path):
    """Input, 3 ms with 40 bytes of parameters, 1 ms with 16."""
    return load_instance(files.write(tmp_path, "p.txt", files.PIPEDREAM))


@pytest.fixture
def layers(tmp_path):
    """The two layers of Piper."""
    return load_instance(files.write(tmp_path, "p.json", files.piper()))


def test_pipedream_by_hand(profile):
    """Replicas share the samples and keep their parameters equal."""
    whole = verify_pipeline(profile, [Stage((0, 1, 2))])
    assert whole.value == 0.004
    slow = dataclasses.replace(profile, bandwidth=10_000.0)
    verdict = verify_pipeline(slow, [Stage((0, 1), replicas=2), Stage((2,))])
    # (0.003 + 4 x 40 / (2 x 10000)) / 2 = 0.0055
    assert verdict.value == pytest.approx(0.0055)
    paid = dataclasses.replace(slow, edge_cost_scale=1.0)
    verdict = verify_pipeline(paid, [Stage((0, 1)), Stage((2,))])
    assert verdict.value == pytest.approx(max(0.003, 2 * 8 / 10_000))


def test_pipedream_memory(profile):
    """Versions are kept for the devices behind a stage."""
    tight = dataclasses.replace(profile, memory_bytes=50.0)
    stages = [Stage((0, 1)), Stage((2,), replicas=2)]
    verdict = verify_pipeline(tight, stages)
    assert verdict.memory_bytes == (2 * 48.0, 0.0)
    assert "stage 0 needs 96 bytes" in verdict.broken[0]


def test_pipedream_rules(profile):
    """Every layer once, in order, on the devices there are."""
    for stages, what in (
        ([Stage((0, 1))], "2 layers (2 different) of 3"),
        ([Stage((2,)), Stage((0, 1))], "its input 1"),
        ([Stage((0, 1, 2), replicas=5)], "5 devices are used of 4"),
        ([Stage((0, 1, 2), replicas=0)], "0 replicas"),
    ):
        assert what in verify_pipeline(profile, stages).broken[0]


def test_piper_by_hand(layers):
    """Compute, edges with their sync bytes, and what data parallelism keeps equal."""
    first = Stage((0,), 1, 2, ("vanilla",))
    second = Stage((1,), 2, 1, ("vanilla",))
    verdict = verify_variants(layers, [first, second])
    # stage 0: 0.6 + 2 x (10 + 20) / 100; stage 1: 2 / 2 + (2 x 10 / 2 + 4 x 40 / 2 / 8) / 100
    assert verdict.value == pytest.approx(max(1.2, 1.2))
    assert verdict.memory_bytes == (5 * 3 + 1, 10 * 1 + 1)
    alone = verify_variants(layers, [Stage((0, 1), 4, 1, ("recomputed", "vanilla"))])
    # 3.5 / 4 + 4 x 3 x 40 / 4 / 8 / 100
    assert alone.value == pytest.approx(0.875 + 0.15)


def test_piper_rules(layers):
    """Batch, devices, variants and memory."""
    for stages, what in (
        ([Stage((0, 1), 3, 1, ("vanilla", "vanilla"))], "3 replicas do not divide"),
        ([Stage((0, 1), 1, 2, ("vanilla", "vanilla"))], "'head' has no variant 'vanilla' for 2"),
        ([Stage((0, 1), 8, 1, ("vanilla", "vanilla"))], "8 devices are used of 4"),
        ([Stage((0, 1), 1, 1, ("vanilla",))], "1 variants for 2 layers"),
    ):
        broken = verify_variants(layers, stages).broken
        assert any(what in text for text in broken), broken
    tight = dataclasses.replace(layers, memory_bytes=20.0)
    verdict = verify_variants(tight, [Stage((0, 1), 1, 1, ("vanilla", "vanilla"))])
    assert "needs 22 bytes" in verdict.broken[0]
