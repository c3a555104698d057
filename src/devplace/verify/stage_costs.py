"""Stages of PipeDream and Piper, from the definitions of their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from devplace.instances.records import PipelineInstance, Variant, VariantInstance
from devplace.verify.verdict import Verdict, exact


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on some devices.

    Attributes:
        nodes: Indices of its layers.
        replicas: Copies that take turns with the samples.
        degree: Devices that each copy is spread over (Piper).
        variants: Which variant each layer runs (Piper), in the order of `nodes`.
    """

    nodes: tuple[int, ...]
    replicas: int = 1
    degree: int = 1
    variants: tuple[str, ...] = ()


def verify_pipeline(instance: PipelineInstance, stages: Sequence[Stage]) -> Verdict:
    """PipeDream's slowest stage, s per sample.

    A stage with `r` replicas takes `(compute + 4 (r - 1) parameters / (r bandwidth)) / r`. Where
    what passes between stages counts, it takes no less than `2 activations / (r bandwidth)`, at
    its begin and at its end. Memory: `ceil(devices of later stages / r)` copies of its parameters
    and activations.
    """
    broken = _stage_rules(len(instance.nodes), instance.edges, stages)
    used = sum(stage.replicas for stage in stages)
    if used > instance.num_devices:
        broken.append(f"{used} devices are used of {instance.num_devices}")
    if broken:
        return Verdict(float("nan"), tuple(broken))
    rate = exact(instance.bandwidth)
    times, memory = [], []
    for number, stage in enumerate(stages):
        own = [instance.nodes[v] for v in stage.nodes]
        count = stage.replicas
        compute = sum((exact(layer.compute_ms) for layer in own), Fraction(0)) / 1000
        parameters = sum((exact(layer.parameter_bytes) for layer in own), Fraction(0))
        stashed = sum((exact(layer.activation_bytes) for layer in own), parameters)
        times.append((compute + 4 * (count - 1) * parameters / (rate * count)) / count)
        for moved in _crossing(instance, stages, number):
            times.append(exact(instance.edge_cost_scale) * 2 * moved / (rate * count))
        later = sum(other.replicas for other in stages[number + 1 :])
        need = -(-later // count) * stashed
        memory.append(float(need))
        if instance.memory_bytes is not None and need > exact(instance.memory_bytes):
            limit = instance.memory_bytes
            broken.append(f"stage {number} needs {memory[-1]:.0f} bytes, more than {limit:.0f}")
    return Verdict(float(max(times)), tuple(broken), tuple(memory))


def _crossing(
    instance: PipelineInstance, stages: Sequence[Stage], number: int
) -> tuple[Fraction, Fraction]:
    """Bytes that come into a stage and that leave it, every output once."""
    stage_of = {v: k for k, stage in enumerate(stages) for v in stage.nodes}
    coming = {a for a, b in instance.edges if stage_of[a] < number <= stage_of[b]}
    leaving = {a for a, b in instance.edges if stage_of[a] <= number < stage_of[b]}
    both = [
        sum((exact(instance.nodes[v].activation_bytes) for v in nodes), Fraction(0))
        for nodes in (coming, leaving)
    ]
    return both[0], both[1]


def verify_variants(instance: VariantInstance, stages: Sequence[Stage]) -> Verdict:
    """Piper's slowest stage, s per sample.

    A stage with data-parallel degree `d` takes, over its layers with their variants, `(2 bytes on
    edges from and to other stages / d + 4 (d - 1) parameters / (d batch)) / bandwidth + time / d`.
    Memory: sum of `a y + b` with `y = ceil(degrees of this and later stages / d)`.
    """
    broken = _stage_rules(len(instance.nodes), [(a, b) for a, b, _ in instance.edges], stages)
    used = sum(stage.replicas * stage.degree for stage in stages)
    if used > instance.num_devices:
        broken.append(f"{used} devices are used of {instance.num_devices}")
    in_flight = sum(stage.replicas for stage in stages)
    if in_flight > instance.batch:
        broken.append(f"the replicas of all stages, {in_flight}, exceed the batch {instance.batch}")
    chosen = [_chosen(instance, stage, broken) for stage in stages]
    broken += [
        f"stage {k}: {stage.replicas} replicas do not divide the batch of {instance.batch}"
        for k, stage in enumerate(stages)
        if stage.replicas >= 1 and instance.batch % stage.replicas
    ]
    if broken:
        return Verdict(float("nan"), tuple(broken))
    times, memory = [], []
    for number, (stage, variants) in enumerate(zip(stages, chosen, strict=True)):
        times.append(_variant_time(instance, stage, variants))
        later = sum(other.replicas for other in stages[number:])
        y = -(-later // stage.replicas)
        need = sum((exact(v.memory_a) * y + exact(v.memory_b) for v in variants), Fraction(0))
        memory.append(float(need))
        if need > exact(instance.memory_bytes):
            limit = instance.memory_bytes
            broken.append(f"stage {number} needs {float(need):.0f} bytes, more than {limit:.0f}")
    return Verdict(float(max(times)), tuple(broken), tuple(memory))


def _variant_time(instance: VariantInstance, stage: Stage, variants: Sequence[Variant]) -> Fraction:
    inside, d = set(stage.nodes), stage.replicas
    moved = Fraction(0)
    for v, variant in zip(stage.nodes, variants, strict=True):
        for a, b, size in instance.edges:
            if b == v and a not in inside:
                moved += 2 * (exact(size) + exact(dict(variant.sync_in)[a]))
            if a == v and b not in inside:
                moved += 2 * (exact(size) + exact(dict(variant.sync_out)[b]))
    parameters = sum((exact(variant.parameter_bytes) for variant in variants), Fraction(0))
    kept_equal = 4 * (d - 1) * parameters / d / instance.batch
    compute = sum((exact(variant.seconds) for variant in variants), Fraction(0))
    return (moved / d + kept_equal) / exact(instance.bandwidth) + compute / d


def _chosen(instance: VariantInstance, stage: Stage, broken: list[str]) -> list[Variant]:
    """The variants of a stage's layers; what is missing is added to `broken`."""
    found = []
    if len(stage.variants) != len(stage.nodes):
        broken.append(f"{len(stage.variants)} variants for {len(stage.nodes)} layers")
        return []
    for v, wanted in zip(stage.nodes, stage.variants, strict=True):
        known = {
            variant.id: variant
            for variant in dict(instance.nodes[v].variants).get(stage.degree, ())
        }
        if wanted not in known:
            name = instance.nodes[v].name
            broken.append(f"layer {name!r} has no variant {wanted!r} for {stage.degree} devices")
            continue
        found.append(known[wanted])
    return found


def _stage_rules(
    count: int, edges: Sequence[tuple[int, int]], stages: Sequence[Stage]
) -> list[str]:
    """Every layer in one stage, producers in the same or an earlier one, at least one device."""
    broken = []
    seen = [v for stage in stages for v in stage.nodes]
    if sorted(seen) != list(range(count)):
        return [f"the stages have {len(seen)} layers ({len(set(seen))} different) of {count}"]
    stage_of = {v: k for k, stage in enumerate(stages) for v in stage.nodes}
    for a, b in edges:
        if stage_of[a] > stage_of[b]:
            broken.append(f"layer {b} is in stage {stage_of[b]}, its input {a} in {stage_of[a]}")
    for k, stage in enumerate(stages):
        if stage.replicas < 1 or stage.degree < 1:
            broken.append(f"stage {k} has {stage.replicas} replicas of {stage.degree} devices")
    return broken
