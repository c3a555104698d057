"""How the compiler is called."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from tests.kernels.groups import X, double, group

from devplace.errors import ExecutionError
from devplace.kernels import compiler
from devplace.kernels.kernel_signature import signature_of


class Made:
    """What the compiler gives."""

    source_code = "a kernel"


@pytest.mark.parametrize(("failing", "device"), [(1, "cuda:0"), (2, "cuda:0"), (0, "cpu")])
def test_other_ways_are_tried(monkeypatch: pytest.MonkeyPatch, failing: int, device: str) -> None:
    """On GPUs, in their order, until one serves."""
    tried: list[Mapping[str, Any]] = []

    def compiled(call: Any, signature: Any, way: Mapping[str, Any]) -> Any:
        tried.append(way)
        if len(tried) <= failing:
            raise RuntimeError("PassManager::run failed")
        return Made()

    monkeypatch.setattr(compiler, "_compiled", compiled)
    call = group(double, X)
    assert compiler.compile_source(call, signature_of(call, device, [X])) == "a kernel"
    assert tried == list(compiler.WAYS[: failing + 1])


@pytest.mark.parametrize(("device", "ways"), [("cuda:0", 3), ("cpu", 1)])
def test_the_last_way_tells_why(monkeypatch: pytest.MonkeyPatch, device: str, ways: int) -> None:
    """Where all fail; on a CPU there is one."""
    tried: list[Any] = []

    def compiled(*args: Any) -> Any:
        tried.append(args)
        raise RuntimeError(f"way {len(tried)} failed\nand more")

    monkeypatch.setattr(compiler, "_compiled", compiled)
    call = group(double, X)
    with pytest.raises(ExecutionError, match=f"^RuntimeError: way {ways} failed$"):
        compiler.compile_source(call, signature_of(call, device, [X]))


ASSEMBLERS = """
import os
from pathlib import Path
from devplace.kernels import compiler
import torch._inductor.runtime.compile_tasks as tasks

tasks.Path = lambda path: Path("{folder}/a/b/c")
before = os.environ.get("TRITON_PTXAS_PATH")
{act}
print(before, os.environ.get("TRITON_PTXAS_PATH"))
"""


@pytest.mark.parametrize(
    "act", ["compiler.choose_assembler()", "compiler.load('def call(args): pass')"]
)
@pytest.mark.slow
def test_kernels_are_loaded_with_torchs_assembler(act: str, tmp_path: Any) -> None:
    """As they are compiled: it is named before Triton asks for one."""
    for folder in (tmp_path, tmp_path / "a"):  # torch 2.11 and 2.13 look in different places
        tool = folder / "bin" / "ptxas"
        tool.parent.mkdir(parents=True)
        tool.write_text("")
        tool.chmod(0o755)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_PTXAS_PATH", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASSEMBLERS.format(folder=tmp_path, act=act)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = done.stdout.split()
    assert before == "None"
    assert after.endswith("/bin/ptxas")
