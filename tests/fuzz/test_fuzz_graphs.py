"""Graphs of other tools: `.pt2` in this process, as nothing of it runs, and ONNX, whose own code
may abort, in processes of its own."""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from devplace.errors import DevplaceError
from devplace.step_capture.archive import load_program
from devplace.step_capture.exported import read_pt2
from tests.fuzz.mutate import mutated
from tests.fuzz.test_fuzz import COUNT, KEPT, LIMIT_S, time_limit

WHOLE_EVERY = 25
"""Taking ops apart takes a second: the programs of so few files go through it."""


@pytest.fixture(scope="module")
def pt2(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small export with an open size, a constant and a body."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, d: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.no_grad():
                y = self.fc(x)
            return torch.relu(y + d["a"]).repeat(2, 1) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    sizes = ({0: torch.export.Dim("batch", min=4, max=64)}, {"a": None})
    inputs = (torch.zeros(8, 4), {"a": torch.zeros(4)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(Net(), inputs, dynamic_shapes=sizes), str(path))
    return path.read_bytes()


def other_archive(data: bytes, rng: random.Random) -> bytes:
    """The archive with one file of it changed, or with changed bytes anywhere."""
    if rng.random() < 0.2:
        return mutated(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    likely = [name for name in files if name.endswith((".json", "model.pt"))]
    name = rng.choice(likely if rng.random() < 0.9 else list(files))
    files[name] = mutated(files[name], rng)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for each, content in files.items():
            archive.writestr(each, content)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_damaged_exports_are_refused_in_words(
    pt2: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No abort, no hang, and nothing but tensors is ever unpickled."""

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("unpickled")

    for function in ("load", "loads"):
        monkeypatch.setattr(pickle, function, never)
    path = tmp_path / "net.pt2"
    path.write_bytes(pt2)
    assert read_pt2(path).ops
    failures = []
    for seed in range(COUNT):
        data = other_archive(pt2, random.Random(f"pt2 {seed}"))
        path.write_bytes(data)
        try:
            with time_limit(LIMIT_S):
                if seed % WHOLE_EVERY == 0:
                    read_pt2(path)
                else:
                    load_program(str(path))
        except DevplaceError as error:
            if "\n" in str(error):
                failures.append(f"seed {seed}: {error!r}")
        except Exception as error:  # `read_pt2` makes one line of it
            if seed % WHOLE_EVERY == 0 or isinstance(error, TimeoutError):
                failures.append(f"seed {seed}: {error!r}")
        except BaseException as error:
            failures.append(f"seed {seed}: {error!r}")
        if failures and KEPT:
            Path(KEPT, f"pt2-{seed}").write_bytes(data)
    assert not failures, "\n".join(failures[:10])


def onnx_model() -> bytes:
    """A few layers of several kinds."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3]),
        helper.make_node("Relu", ["c"], ["r"], name="/layer/Relu"),
        helper.make_node("Shape", ["r"], ["s"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("Gemm", ["f", "v", "b"], ["g"], transB=1),
        helper.make_node("Constant", [], ["k"], value_floats=[1.0, 2.0]),
        helper.make_node("Add", ["g", "k"], ["y"]),
    ]
    values = {"w": (4, 1, 3, 3), "v": (2, 16), "b": (2,)}
    weights = [
        helper.make_tensor(name, kind, shape, [0.0] * int(torch.Size(shape).numel()))
        for name, shape in values.items()
    ]
    inputs = [helper.make_tensor_value_info("x", kind, [1, 1, 4, 4])]
    outputs = [helper.make_tensor_value_info("y", kind, [1, 2])]
    graph = helper.make_graph(nodes, "net", inputs, outputs, weights)
    return bytes(helper.make_model(graph).SerializeToString())


@pytest.mark.slow
def test_damaged_onnx_files_are_refused_in_words(tmp_path: Path) -> None:
    """Where ONNX itself does not abort, an error of devplace names what is wrong."""
    command = [sys.executable, "-m", "tests.fuzz.onnx_forks", str(COUNT), str(tmp_path), KEPT or ""]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, input=onnx_model(), capture_output=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stdout, done.stdout.decode()[:3000]
