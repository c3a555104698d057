"""Reads an ONNX file: `python -m devplace.graph.onnx_worker PATH [BATCH]`.

ONNX's own code aborts the process on some damaged files, so it has one of its own. The graph, or
what is wrong with the file, is written to stdout; the exit code tells which.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from devplace.errors import InputError
from devplace.graph.graph import OpGraph
from devplace.graph.serialize import from_json, to_json

LIMIT_S = 600.0
"""Longest time for a file, s; shape inference of 20,000 nodes takes 5."""


def read_in_child(path: str, batch: int | None) -> OpGraph:
    """The graph, read by another process.

    Raises:
        InputError: The file cannot be read, or no process can be started.
    """
    command = [sys.executable, "-m", "devplace.graph.onnx_worker", path]
    command += [] if batch is None else [str(batch)]
    folders = os.pathsep.join(part or os.getcwd() for part in sys.path)
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": folders},
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{path} cannot be read within {LIMIT_S:.0f} s.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"No process to read {path} can be started: {error}.") from error
    if ended.returncode == 0:
        return from_json(ended.stdout, path)
    if ended.returncode == InputError.exit_code:
        raise InputError(ended.stdout.decode(errors="replace"))
    lines = ended.stderr.decode(errors="replace").strip().splitlines() or ["nothing was said"]
    how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"code {ended.returncode}"
    raise InputError(
        f"{path} is no valid ONNX model: the process that read it ended with {how}: "
        f"{lines[-1][:160]}. Export it again."
    )


def main() -> None:
    """Read the file that the arguments name."""
    from devplace.graph.onnx_file import read_here

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
    path, *batch = sys.argv[1:]
    code = 0
    try:
        data = to_json(read_here(path, int(batch[0]) if batch else None))
    except InputError as error:
        data, code = str(error).encode(errors="backslashreplace"), error.exit_code
    with answer:
        answer.write(data)
    sys.exit(code)


if __name__ == "__main__":
    main()
