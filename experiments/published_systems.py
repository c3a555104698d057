"""What a reader must know of each system of the published tables, told by its own module.

Which groups it places, what a placement that fails costs, which models its settings were tuned on,
and where it differs from its paper: all read from the placers and their docstrings.
"""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from typing import Any

from devplace import placers

SYSTEMS = (
    *("colocrl", "hdp", "spotlight", "placeto", "post"),
    *("grouper-placer", "encoder-placer", "mars"),
)
LISTS = ("Differs from", "These are kept except")
"""How the lists in docstrings begin that tell of differences."""
FAMILY = ("hdp", "post", "mars", "placeto")
"""Systems whose variants have their name in front."""


def docstring(system: str) -> str:
    """Of the module of a system."""
    module = import_module(f"devplace.research.{placers.LEARNING[system][0]}")
    return module.__doc__ or ""


def differences(text: str) -> list[str]:
    """Entries of the lists in a docstring that tell where it differs from the paper."""
    found: list[str] = []
    is_in = False
    for line in text.splitlines():
        if line.startswith("- ") and is_in:
            found.append(line[2:])
        elif line.startswith("  ") and is_in and found:
            found[-1] += " " + line.strip()
        elif line and not line.startswith(("- ", "  ")):
            is_in = line.startswith(LISTS) or (is_in and not found)
    return [entry.rstrip(".") for entry in found]


def tuned_on(placer: str) -> set[str]:
    """Workloads that settings of a system or of its variant were tuned on."""
    name = next((system for system in FAMILY if placer.startswith(system)), placer)
    if name not in placers.LEARNING or placer.endswith(("-strict", "-per-step")):
        return set()
    return set(re.findall(r"tuned\s+on\s+([a-z]+-[0-9]+)", docstring(name)))


def groups(placer: Any) -> str:
    """What a system places."""
    if placer.name == "hdp":
        return "colocation groups, in 20 groups per device (256 at most) that it learns"
    return f"at most {placer.groups} groups of ops"


def rule(placer: Any) -> str:
    """What a placement costs it that fails."""
    if getattr(placer, "memory", "hard") == "hard":
        return "more than all that fit, by the bytes over"
    if hasattr(placer, "s_per_gb"):
        return f"{placer.s_per_gb:g} s more for each GB over, {placer.most_s:g} s at most"
    return f"{placer.failing_s:g} s, whatever is over"


def ground(system: str, is_limited: bool) -> tuple[str, str]:
    """Rows of random sampling and of the climber with a system's groups, devices and memory rule.

    Args:
        is_limited: Whether a limit binds; if not, all memory rules are the same.
    """
    placer: Any = placers.by_name(system)
    space = "all" if system == "hdp" else "64"
    climber = f"climb-{space}"
    if is_limited and getattr(placer, "memory", "hard") != "hard":
        climber += "-per-gb" if hasattr(placer, "s_per_gb") else "-constant"
    return f"random-{space}", climber


def table() -> list[str]:
    """Rows of a table: system, what it places, rule for memory, models it was tuned on."""
    found = []
    for name in SYSTEMS:
        placer, models = placers.by_name(name), ", ".join(sorted(tuned_on(name)))
        found.append(f"| {name} | {groups(placer)} | {rule(placer)} | {models or 'not recorded'} |")
    return found


def difference_rows() -> list[str]:
    """Rows of a table: system, and one difference from its paper each."""
    return [
        f"| {name} | {entry.replace('|', chr(92) + '|')} |"
        for name in SYSTEMS
        for entry in differences(docstring(name))
    ]


def setting_rows(variants: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    """Rows of a table: variant, what is another setting in it than in the system, where it was run.

    Args:
        variants: Name -> placer with other settings.
        runs: Of the result file.
    """
    found = []
    for name, variant in variants.items():
        own: Any = type(variant)()
        changed = [
            f"{field.name} {getattr(variant, field.name)} ({getattr(own, field.name)})"
            for field in fields(own)
            if field.name != "name" and getattr(variant, field.name) != getattr(own, field.name)
        ]
        own_runs = [run for run in runs if run["placer"] == name]
        where = [
            f"{workload} ({sum(run['workload'] == workload for run in own_runs)} seeds)"
            for workload in dict.fromkeys(run["workload"] for run in own_runs)
        ]
        found.append(f"| {name} | {', '.join(changed)} | {', '.join(where) or 'not run'} |")
    return found
