"""Keep weights where another plan has them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from devplace.problem.device_names import resolve_device

if TYPE_CHECKING:
    from devplace.problem.problem import Problem


def keep_homes(problem: Problem, allowed: NDArray[np.bool_]) -> set[int]:
    """Narrow the devices of colocation groups to the homes of the sources in them.

    A source that steps replace is in a group. One that they only read has none of its own and sits
    with its readers, so these go to its home unless their group is drawn elsewhere. Of several
    homes that with the most bytes counts; one that kernels or pins rule out does not.

    Args:
        problem: Its `homes` are names of source ops and of devices.
        allowed: Devices each group may go to, bool `[G, D]`; is changed.

    Returns:
        The groups that are kept where they are.
    """
    graph, machine, tasks = problem.graph, problem.machine, problem.core.tasks
    by_name = {op.name: index for index, op in enumerate(graph.ops) if op.is_source}
    own: dict[int, Counter[int]] = {}
    read: dict[int, Counter[int]] = {}
    for name, device_name in problem.homes.items():
        if name not in by_name:
            continue
        op = by_name[name]
        device = machine.device_index[resolve_device(machine, device_name, f"home of {name!r}")]
        size = graph.tensors[graph.ops[op].outputs[0]].num_bytes
        if tasks.op_task[op] >= 0:
            group = int(tasks.group[tasks.op_task[op]])
            own.setdefault(group, Counter())[device] += size
        elif tasks.op_const[op] >= 0:
            const = int(tasks.op_const[op])
            users = tasks.const_user[tasks.const_ptr[const] : tasks.const_ptr[const + 1]]
            for group in set(tasks.group[users].tolist()):
                read.setdefault(group, Counter())[device] += size
    kept = set()
    for group, found in {**read, **own}.items():
        home = max(sorted(found), key=lambda device: found[device])
        if allowed[group, home]:
            allowed[group] = False
            allowed[group, home] = True
            kept.add(group)
    return kept
