"""The computations inside ops by module: one for a plain op, all members of a fused one."""

from __future__ import annotations

from devplace.graph.graph import Member, Op, OpGraph, Stage

Part = Op | Member


def parts_of(op: Op) -> tuple[Part, ...]:
    """The members of a fused op, else the op itself."""
    return op.members or (op,)


def modules_of(op: Op) -> tuple[str, ...]:
    """Modules of what an op computes, in order."""
    return tuple(dict.fromkeys(part.module for part in parts_of(op)))


def module_shares(op: Op, amount: int) -> dict[str, int]:
    """An amount of an op, such as its time in ns, divided among the modules of its members.

    In proportion to the bytes that each member reads and writes when it runs alone (equally if
    that is nothing for all), rounded so that the shares add up to the amount. Views have none.

    Example:
        >>> members = (Member("a", "add", "forward", "left", moved_bytes=8),
        ...            Member("b", "mul", "forward", "right", moved_bytes=4))
        >>> module_shares(Op("both", "fused", members=members), 100)
        {'left': 66, 'right': 34}
    """
    if not op.members:
        return {op.module: amount}
    weights = [member.moved_bytes for member in op.members]
    if not any(weights):
        weights = [int(not member.is_view) for member in op.members]
    total, upto, given = max(1, sum(weights)), 0, 0
    shares: dict[str, int] = {}
    for member, weight in zip(op.members, weights, strict=True):
        upto += weight
        share = amount * upto // total - given
        given += share
        shares[member.module] = shares.get(member.module, 0) + share
    return shares


def readers_in(graph: OpGraph, op: Op, tensor: int) -> list[Part]:
    """What reads a tensor, or views of it, within an op that does: members, or the op itself."""
    if not op.members:
        return [op]
    places = {k for k, read in enumerate(op.inputs) if _shows(graph, read, tensor)}
    readers = [m for m in op.members if not m.is_view and not places.isdisjoint(m.reads)]
    return list(readers or op.members)


def _shows(graph: OpGraph, view: int, tensor: int) -> bool:
    """Whether a tensor is another one or a view of it."""
    while view != tensor:
        op = graph.ops[graph.producer[view]]
        if not op.is_view:
            return False
        view = op.alias_of
    return True


def stage_of(graph: OpGraph, tensor: int) -> Stage:
    """Stage of what makes a tensor: the op, or the member of a fused op."""
    op, name = graph.ops[graph.producer[tensor]], graph.tensors[tensor].name.partition(":")[0]
    return next((member.stage for member in op.members if member.name == name), op.stage)


def where_text(op: Op, most: int = 2) -> str:
    """Modules of an op in words; of many the first few. Empty for the model itself."""
    found = [module for module in modules_of(op) if module]
    return some_text(found, most)


def calls_text(op: Op, most: int = 3) -> str:
    """What an op calls: its target; of a fused op the short names of its members' targets."""
    if not op.members:
        return op.target
    calls = dict.fromkeys(_short(target) for target in op.targets)
    return some_text(list(calls), most)


def some_text(names: list[str], most: int) -> str:
    """The first few of some names, and how many more there are.

    Example:
        >>> some_text(["a", "b", "c", "d"], 2)
        'a, b and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _short(target: str) -> str:
    """`add` of `aten.add.Tensor`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else target
