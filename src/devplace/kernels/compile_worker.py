"""A compiling process, `python -m devplace.kernels.compile_worker`; it may crash or hang.

It writes a line feed to stdout when it is ready; then it reads pickled (call, signature) pairs from
stdin, and writes one for each when the kernel, or the reason why there is none, is on disk.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
from typing import Any

from devplace.device_kinds import kind_of
from devplace.errors import ExecutionError
from devplace.files import alone
from devplace.graph.fusion.call import FusedCall
from devplace.kernels.compiler import Function, load
from devplace.kernels.fused import source_of
from devplace.kernels.kernel_signature import Layout, Signature, place_of
from devplace.kernels.store import KernelStore


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    importlib.import_module("torch._inductor.compile_fx")  # before the first kernel is there
    channel.write(b"\n")
    channel.flush()
    while True:
        try:
            call, signature = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        make(call, signature)
        channel.write(b"\n")
        channel.flush()


def make(call: FusedCall, signature: Signature, tries: bool = True) -> None:
    """Compile a kernel, its binaries too, and try it once, so that all choices are made.

    Args:
        call: The group.
        signature: What it is compiled for.
        tries: Whether to try it; if it is faulty, that may cost the process.
    """
    store = KernelStore(place_of(signature.device))
    try:
        function = load(source_of(call, signature))
    except ExecutionError as error:
        store.write_failure(signature.key, str(error))
        return
    if tries and kind_of(signature.device).has_graphs:
        store.folder.mkdir(parents=True, exist_ok=True)
        with alone(store.folder / "lock"):  # since it also takes their times
            _try(function, signature)


def _try(function: Function, signature: Signature) -> None:
    """Run a kernel on made-up inputs; where there is no room the first step does it."""
    import torch

    device = torch.device(signature.device)
    try:
        with torch.cuda.device(device):
            function([_made_up(layout, device) for layout in signature.layouts])
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()


def _made_up(layout: Layout, device: Any) -> Any:
    """Zeros, which are valid as indices."""
    import torch

    pairs = zip(layout.shape, layout.strides, strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    offset = 0 if layout.is_aligned else 1
    whole = torch.zeros(max(0, span) + offset, dtype=getattr(torch, layout.dtype), device=device)
    return whole.as_strided(layout.shape, layout.strides, offset)


if __name__ == "__main__":
    main()
