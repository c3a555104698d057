"""How the compiler is called."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.kernels.groups import X, double, group

from devplace.errors import ExecutionError
from devplace.kernels import compiler
from devplace.kernels.kernel_signature import signature_of


def count_up(*counters: Any) -> Any:
    """What the batch norms of a model do."""
    return tuple(counter + 1 for counter in counters)


def counted(device: str) -> str:
    """Source of a kernel that counts up five counters, which it did."""
    counters = [torch.tensor(10 * k, device=device) for k in range(5)]
    call = group(count_up, *counters, over=tuple((k, k) for k in range(5)))
    signature = signature_of(call, device, counters)._replace(writes=call.over)
    source = compiler.compile_source(call, signature)
    assert compiler.load(source)(list(counters)) == ()
    assert [counter.item() for counter in counters] == [1, 11, 21, 31, 41]
    return source


def test_counters_are_counted_in_place() -> None:
    """All of them, where they lie."""
    assert counted("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counters_are_one_kernel() -> None:
    """On a GPU one is started for all of them."""
    source = counted("cuda:0")
    assert source.count("async_compile.triton(") == source.count(".run(") == 1


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
