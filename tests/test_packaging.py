"""The package as it is installed: version, contents, and what it must not say."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import devplace
from devplace.errors import DevplaceError
from devplace.problem import Problem

ROOT = Path(__file__).parents[1]
PRODUCT = ("src", "native", "docs", "examples", "benchmarks", "experiments", "tests", ".ci")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel without the native part, as built where there is no compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    settings = {"wheel.cmake": "false", "wheel.py-api": "py3", "build-dir": str(folder / "build")}
    code = (
        "from scikit_build_core.build import build_wheel\n"
        f"print(build_wheel({str(folder)!r}, {settings!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    assert path.name == f"devplace-{devplace.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def test_version_is_the_same_everywhere() -> None:
    """`devplace.__version__`, pyproject.toml and the installed package agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert devplace.__version__ == project["version"] == version("devplace")


def test_changelog_knows_the_version() -> None:
    """CHANGELOG.md has an entry for the present version."""
    assert f"## {devplace.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """A wheel has every file of the package, the licence, type marker; no tests, no sources of
    the native part."""
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert all(name.startswith("devplace/") for name in names)
    have = {path.relative_to(ROOT / "src").as_posix() for path in _package_files()}
    assert set(names) == have
    assert "devplace/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_wheel_is_small(wheel: zipfile.ZipFile) -> None:
    """No file of the package exceeds 100 kB."""
    large = {info.filename: info.file_size for info in wheel.infolist() if info.file_size > 100_000}
    assert large == {}


def test_command_is_installed(wheel: zipfile.ZipFile) -> None:
    """The wheel declares the command `devplace`."""
    (name,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    assert "devplace = devplace.cli:main" in wheel.read(name).decode().replace("=", " = ").replace(
        "  ", " "
    )


def test_product_names_no_machine_of_its_makers() -> None:
    """No file mentions paths of a developer's machine or the hosts of package registries."""
    places = r"/(home|root|work|Users)/\w|/opt/|shared/(design|users|style)"
    pattern = re.compile(places + r"|pypi\.org|download\.pytorch\.org")
    found = []
    for path in _text_files():
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_files_stay_small() -> None:
    """No source file of the package or of its tests is longer than 600 lines."""
    files = [*_package_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "native").rglob("*.?pp")]
    long = {
        path.name: count
        for path in files
        if path.suffix in (".py", ".hpp", ".cpp")
        and (count := len(path.read_text().splitlines())) > 600
    }
    assert long == {}


def test_plan_is_the_same_without_the_native_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the plain Python simulator leads to the same plan, byte for byte."""
    from devplace.simulator import kernel

    problem = _small_problem()

    def plan() -> bytes:
        return devplace.place(problem, devplace.placers.Search(), "60ev", seed=3).plan.to_json()

    native = plan()
    monkeypatch.setattr(kernel, "native_module", lambda: None)
    assert isinstance(kernel.make_kernel(problem.core), kernel.ReferenceKernel)
    assert plan() == native


def test_every_error_has_a_documented_exit_code() -> None:
    """Errors a user can meet exit with one of the documented codes."""

    def family(kind: type[DevplaceError]) -> list[type[DevplaceError]]:
        return [kind, *(k for child in kind.__subclasses__() for k in family(child))]

    assert {kind.exit_code for kind in family(DevplaceError)} <= {1, 2, 3, 4, 5}


def _small_problem() -> Problem:
    workload = devplace.workloads.build("rnnlm", size="small")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    graph = devplace.capture(workload.model, workload.inputs, workload.loss_fn, optimizer)
    machine = devplace.load_machine("k40x2")
    return Problem(graph, machine, devplace.Analytic()(graph, machine))


def _package_files() -> list[Path]:
    files = [path for path in (ROOT / "src" / "devplace").rglob("*") if path.is_file()]
    return [p for p in files if "__pycache__" not in p.parts and p.suffix not in (".so", ".pyd")]


def _text_files() -> list[Path]:
    kinds = (".py", ".md", ".toml", ".cpp", ".hpp", ".txt", ".html", ".j2", ".json", ".out", ".sh")
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
    files += [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", ROOT / ".ci" / "run"]
    for folder in PRODUCT:
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
    return [p for p in files if "_build" not in p.parts and p.exists()]
