"""What is imported when, and which files may use torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "devplace"

# Files (or folders) that need torch to be of any use.
USE_TORCH = (
    "step_capture/",
    "graph/fusion/call",
    "graph/fusion/fused_program",
    "graph/functional_ops",
    "graph/fx_data",
    "kernels/",
    "cost/measuring_worker",
    "cost/made_up_inputs",
    "cost/worker_process",
    "cost/profiled",
    "cost/remote",
    "cost/settings",
    "cost/source_values",
    "cost/streams",
    "cost/sustained",
    "cost/op_timing",
    "cost/index_values",
    "research/",
    "run/",
    "tune/",
    "auto/",
    "workloads/",
)
# Others import it inside a function, only when that function is called:
# detect asks torch for GPUs, the command line builds optimizers, examples need tensors.
USE_TORCH_LATE = ("machine/detect.py", "cli/", "testing/", "placers/")


def torch_imports(path: Path) -> Iterator[tuple[int, bool]]:
    """Line of each import of torch, and whether it is made only when a function is called."""
    tree = ast.parse(path.read_text())
    late = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.split(".")[0] == "torch" for name in names):
            yield node.lineno, node in late or _is_for_types(tree, node)


def _is_for_types(tree: ast.Module, node: ast.AST) -> bool:
    for branch in ast.walk(tree):
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING"):
            return node in list(ast.walk(branch))
    return False


@pytest.mark.slow
def test_torch_is_imported_only_where_it_is_needed() -> None:
    """torch is imported in capture, profiling, running, workloads and learned placers only; a few
    others import it inside functions."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for line, is_late in torch_imports(path):
            allowed = USE_TORCH + USE_TORCH_LATE if is_late else USE_TORCH
            if not name.startswith(allowed):
                wrong.append(f"{name}:{line}")
    assert wrong == []


@pytest.mark.parametrize(
    "code",
    [
        "import devplace",
        "import devplace.graph, devplace.graph.serialize, devplace.graph.coarsen",
        "import devplace.machine, devplace.cost, devplace.problem, devplace.simulator",
        "import devplace.plan, devplace.placers",
        "import devplace as dp; dp.load_machine('k40x4'); dp.workloads.describe('nmt-4')",
        "import devplace as dp; dp.placers.Search(), dp.Budget.parse('30s')",
    ],
)
def test_planning_does_not_load_torch(code: str) -> None:
    """Everything up to planning a saved graph works without loading torch."""
    assert _loaded_by(code).isdisjoint({"torch", "rich", "jinja2"})


def test_import_devplace_loads_almost_nothing() -> None:
    """`import devplace` loads no numpy, torch, click or rich: names come when first used."""
    heavy = {"torch", "numpy", "rich", "jinja2", "click", "msgspec"}
    assert _loaded_by("import devplace").isdisjoint(heavy)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_loads_no_heavy_package(arguments: list[str]) -> None:
    """`devplace --help` answers without torch, numpy, rich or jinja2."""
    code = (
        "import devplace.cli\n"
        f"sys.argv = ['devplace', *{arguments!r}]\n"
        "try:\n    devplace.cli.main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
    )
    assert _loaded_by(code).isdisjoint({"torch", "numpy", "rich", "jinja2"})


def test_every_public_name_can_be_loaded() -> None:
    """Each name in `devplace.__all__` resolves, and an unknown one is an AttributeError."""
    import devplace

    for name in devplace.__all__:
        assert getattr(devplace, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        devplace.no_such_name  # noqa: B018


def _loaded_by(code: str) -> set[str]:
    """Top-level modules that are loaded after `code` ran in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('LOADED', *{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())
