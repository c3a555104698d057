"""Reads damaged ONNX files, each in a process forked from this small one; prints what is wrong."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import onnx.shape_inference  # once, before all forks

from devplace.errors import DevplaceError
from devplace.graph.onnx_file import read_here
from tests.fuzz.mutate import mutated

LIMIT_S = 10


def read_forked(path: Path, said: Path) -> str | None:
    """What is wrong with how a process of its own reads a file; that it aborts is not: its parent
    is there for that."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # of the processor's time
            signal.alarm(12 * LIMIT_S)
            graph = read_here(str(path))
            code = 0 if all(tensor.num_bytes >= 0 for tensor in graph.tensors) else 3
        except DevplaceError as error:
            said.write_text(str(error), errors="backslashreplace")
            code = 4 if "\n" in str(error) else 0
        except BaseException as error:
            said.write_text(repr(error), errors="backslashreplace")
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "it hangs" if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM) else None
    code = os.WEXITSTATUS(status)
    return f"exit code {code}: {said.read_text()}" if code else None


def main(count: int, folder: Path, kept: str) -> None:
    """Read so many damaged forms of the file on stdin."""
    good, path, said = sys.stdin.buffer.read(), folder / "net.onnx", folder / "said"
    said.write_text("")
    path.write_bytes(good)
    assert read_forked(path, said) is None, said.read_text()
    assert not said.read_text()
    for seed in range(count):
        data = mutated(good, random.Random(f"onnx {seed}"))
        path.write_bytes(data)
        wrong = read_forked(path, said)
        if wrong is not None:
            print(f"seed {seed}: {wrong[:300]}", flush=True)
            if kept:
                Path(kept, f"onnx-{seed}").write_bytes(data)


if __name__ == "__main__":
    assert onnx
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
