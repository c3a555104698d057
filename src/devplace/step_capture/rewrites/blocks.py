"""Computes whole blocks of a model again in the backward pass, which then keeps only their inputs.

As `torch.utils.checkpoint` around each block does (Chen et al. 2016, "Training deep nets with
sublinear memory cost"), but by the graph: statistics are not written twice, and what the backward
pass does not read is not computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import nn

from devplace.errors import CaptureError, did_you_mean
from devplace.step_capture.cleanup import remove_dead
from devplace.step_capture.rewrites.min_cut import is_late
from devplace.step_capture.rewrites.readers import Readers
from devplace.step_capture.tags import recomputed

Node: TypeAlias = torch.fx.Node

_LISTS = (nn.ModuleList, nn.Sequential)


def named_blocks(model: nn.Module, wanted: bool | Sequence[str]) -> tuple[str, ...]:
    """Names of the modules that are computed again.

    Args:
        model: The model.
        wanted: Their names (of a list that is not called, its members count), or True for the
            repeated ones: members, with modules of their own, of a ModuleList or Sequential that
            holds several of their class. Of nested ones the outermost counts, but not a list of
            blocks.

    Raises:
        CaptureError: A name that the model does not have; or True, and nothing is repeated.
    """
    if wanted is False:
        return ()
    modules = dict(model.named_modules(remove_duplicate=False))
    if wanted is not True:
        if isinstance(wanted, str | bytes) or not isinstance(wanted, Iterable):
            raise CaptureError(f"recompute must be True, False or names of modules: {wanted!r}.")
        names = list(wanted)
        unknown = [name for name in names if not (isinstance(name, str) and name in modules)]
        if unknown:
            hint = did_you_mean(str(unknown[0]), modules)
            raise CaptureError(f"recompute names no module of the model: {unknown[0]!r}.{hint}")
        first = {id(module): name for name, module in model.named_modules()}
        return tuple(dict.fromkeys(first[id(modules[name])] for name in names))
    found: list[str] = []
    for name in _members(model):
        is_list = isinstance(modules[name], _LISTS) and any(_members(modules[name]))
        if not (is_list or any(name.startswith(f"{block}.") for block in found)):
            found.append(name)
    if not found:
        raise CaptureError(
            "Blocks are computed again where a ModuleList or Sequential repeats them, and this "
            "model repeats nothing. Name its modules instead: recompute=['encoder', 'decoder']."
        )
    return tuple(found)


def _members(model: nn.Module) -> Iterator[str]:
    """Names of modules with modules of their own that stand in a list beside one of their class."""
    for name, module in model.named_modules():
        if isinstance(module, _LISTS):
            count = Counter(type(each) for each in module)
            for key, each in module.named_children():  # one that stands there twice comes once
                if count[type(each)] > 1 and any(each.children()):
                    yield f"{name}.{key}" if name else key


def recompute_blocks(graph: torch.fx.Graph) -> None:
    """Let the backward pass read copies of what the forward pass computes in tagged blocks.

    What the forward pass reads of a block elsewhere, its outputs, is kept. Copies of a call of a
    block stand before the first op that reads one; their tags, and so what random ops draw, are
    those of the originals but for `recomputed`.

    Args:
        graph: A captured step, functional and clean, with `val` and `tag` of every node.

    Complexity: O(V + E).
    """
    readers = Readers(graph)
    for call in reversed(_calls(graph)):  # later blocks read what earlier ones keep
        _copy(graph, readers, call)
    remove_dead(graph)


def _calls(graph: torch.fx.Graph) -> list[list[Node]]:
    """Forward nodes of each call of each block, in order."""
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not is_late(node) and node.meta["tag"].block >= 0:
            found.setdefault(node.meta["tag"].block, []).append(node)
    return [found[number] for number in sorted(found)]


def _copy(graph: torch.fx.Graph, readers: Readers, call: Sequence[Node]) -> None:
    """Copy what late ops read of one call, and what that needs."""
    inside = set(call)

    def is_repeated(node: Node) -> bool:
        """Whether a node is of this call, and nothing else keeps its value for later."""
        value = readers.value[node]
        if node not in inside or readers.maker(value) not in inside:
            return False
        return all(is_late(each) or each in inside for each in readers.readers[value])

    given = [
        (user, node) for node in call if is_repeated(node) for user in node.users if is_late(user)
    ]
    if not given:
        return
    needed: set[Node] = set()
    todo = [node for _, node in given]
    while todo:
        node = todo.pop()
        if node not in needed and is_repeated(node):
            needed.add(node)
            todo += node.all_input_nodes
    copies: dict[Node, Node] = {}
    with graph.inserting_before(min(user for user, _ in given)):
        for node in sorted(needed):
            copy = graph.node_copy(node, lambda each: copies.get(each, each))
            copy.meta["tag"] = recomputed(node.meta["tag"])
            copies[node] = copy
    for user, node in given:
        user.replace_input_with(node, copies[node])
