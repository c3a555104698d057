"""The measuring process, `python -m devplace.cost.measuring_worker`; it may crash or hang.

Messages are pickles behind their length, eight bytes, on stdin and stdout. Whatever else is
printed goes to stderr.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import struct
import sys
from typing import IO, Any

LENGTH = struct.Struct("<Q")
MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")
_outgoing: IO[bytes] | None = None


def packed(message: Any) -> bytes:
    """A message as it is sent."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def read_message(stream: IO[bytes]) -> Any:
    """The next message.

    Raises:
        EOFError: The other side has ended.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    """Serve the parent until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Run as a script this module has another name than for those who import it.
    importlib.import_module("devplace.cost.measuring_worker").serve(sys.stdin.buffer, channel)


def serve(incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Answer messages.

    `("settings", values)` are torch's, `("keep", key, bytes)` is kept, and `("do", function, ...)`
    is answered by the function of that name, `module:name`, which is given what is kept, and gives
    its answer and whether this process can go on.
    """
    global _outgoing
    _outgoing = outgoing
    kept: dict[Any, Any] = {}
    while True:
        try:
            kind, *rest = read_message(incoming)
        except EOFError:
            return
        if kind == "settings":
            from devplace.cost.settings import apply_settings

            apply_settings(*rest)
        elif kind == "keep":
            kept[rest[0]] = rest[1]
        else:
            module, _, name = rest[0].partition(":")
            answer, is_healthy = getattr(importlib.import_module(module), name)(kept, *rest[1:])
            _send(("answer", answer, is_healthy))
            if not is_healthy:
                return


def begin(what: str) -> None:
    """Tell the parent what this process is about to do, in case it dies of it."""
    if _outgoing is not None:
        _send(("at", what))


def _send(message: Any) -> None:
    assert _outgoing is not None
    _outgoing.write(packed(message))
    _outgoing.flush()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had too little memory."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in MEMORY_WORDS)


def keep_out_of_collections() -> None:
    """Take what is there out of garbage collections: a step's graph is large, and it stays."""
    import gc

    gc.collect()
    gc.freeze()


def free_memory() -> None:
    """Let go of what was held before."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
