"""Memory of a GPU that processes of one host share with each other."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.multiprocessing import reductions

from devplace.run.cuda.device import CudaDevice
from devplace.run.ranks.group import Group

_DEVICE = 6
"""Place of the GPU among the arguments that torch rebuilds a tensor from."""


def offer_tensors(tensors: Mapping[int, Any]) -> dict[str, Any]:
    """What another process needs to open tensors of a GPU, as plain JSON; torch keeps their memory
    for as long as any process has it open.

    Raises:
        RuntimeError: It cannot be shared.
    """
    memory: list[str] = []
    places: dict[int, int] = {}
    parts = []
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage()
        place = places.setdefault(storage.data_ptr(), len(memory))
        if place == len(memory):
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            args = reductions.reduce_tensor(whole)[1]
            memory.append(base64.b64encode(pickle.dumps(args)).decode())
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout = (tensor.storage_offset(), list(tensor.shape), list(tensor.stride()))
        parts.append([key, place, dtype, *layout])
    return {"memory": memory, "parts": parts}


def open_tensors(
    offer: Mapping[str, Any], torch_device: Any, wants: Callable[[int], bool]
) -> dict[int, Any]:
    """Tensors of another process of this host, as those of a GPU that can reach their memory.

    The GPU they lie on need not be visible here, and gets no context of this process.

    Args:
        offer: Of `offer_tensors`.
        torch_device: The GPU.
        wants: Whether a tensor is opened, by its key.

    Raises:
        RuntimeError: The GPU cannot reach it, or the system forbids it.
    """
    opened: dict[int, Any] = {}
    found = {}
    for key, place, dtype, offset, shape, strides in offer["parts"]:
        if not wants(key):
            continue
        with torch.cuda.device(torch_device):
            if place not in opened:
                args = list(pickle.loads(base64.b64decode(offer["memory"][place])))
                args[_DEVICE] = torch.device(torch_device).index
                opened[place] = reductions.rebuild_cuda_tensor(*args).untyped_storage()
            empty = torch.empty(0, dtype=getattr(torch, dtype), device=torch_device)
            found[key] = empty.set_(opened[place], offset, shape, strides)
    return found


def can_share(group: Group, device: CudaDevice) -> bool:
    """Whether every process can store into the memory of every other one's GPU; it is tried.

    `NCCL_P2P_DISABLE=1` forbids it, as it does for NCCL.

    Raises:
        RankError: Another process failed.
    """
    cell, offer = None, {}
    if len(set(group.hosts)) == 1 and os.environ.get("NCCL_P2P_DISABLE", "0") == "0":
        cell = torch.zeros(group.size, dtype=torch.int32, device=device.torch_device)
        try:
            offer = offer_tensors({0: cell})
        except RuntimeError:
            cell = None
    offers = group.exchange("a cell to share", offer, "compile")
    is_open = all(offers)
    try:
        for rank, each in enumerate(offers):
            if is_open and rank != group.rank:
                far = open_tensors(each, device.torch_device, lambda _: True)[0]
                far[group.rank] = 1 + group.rank
        torch.cuda.synchronize(device.torch_device)
    except RuntimeError:
        is_open = False
    if not all(group.exchange("cells opened", is_open, "compile")) or cell is None:
        return False
    seen = cell.tolist()
    came = all(seen[rank] == 1 + rank for rank in range(group.size) if rank != group.rank)
    return all(group.exchange("cells written", came, "compile"))
