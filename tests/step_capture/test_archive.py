"""A `.pt2` file is read without running anything in it."""

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

from devplace.errors import InputError
from devplace.step_capture.exported import read_pt2

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Files of an export with an open size, by name."""
    path = tmp_path_factory.mktemp("good") / "net.pt2"
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
    sizes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    exported = torch.export.export(model, (torch.zeros(3, 8),), dynamic_shapes=sizes)
    torch.export.save(exported, str(path))
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path, files):
    """An archive of these files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def pickled(value):
    """As torch saves an object."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def change(files, ending, change):
    """The files, with the JSON of one changed."""
    name = next(name for name in files if name.endswith(ending))
    data = json.loads(files[name])
    change(data)
    return {**files, name: json.dumps(data).encode()}


def nodes_of(data):
    """Nodes of a graph."""
    return data["graph_module"]["graph"]["nodes"]


def test_sample_inputs_are_not_read(good, tmp_path):
    """Whatever they hold, the plan does not need it."""
    name = next(name for name in good if "sample_inputs" in name)
    mark = tmp_path / "ran"
    path = write(tmp_path / "e.pt2", {**good, name: pickled(((Runs(mark),), {}))})
    assert "aten.addmm.default" in {op.target for op in read_pt2(path).ops}
    assert not mark.exists()


@pytest.mark.parametrize("name", ["weight_0", "opaque_obj_0", "custom_obj_0"])
def test_pickles_of_weights_and_objects_do_not_run(good, tmp_path, name):
    """Weights are read as tensors only; objects are refused."""
    mark = tmp_path / "ran"

    def pickles(data):
        entry = next(iter(data["config"].values()))
        entry.update(use_pickle=True, path_name=name)

    files = change(good, "model_weights_config.json", pickles)
    files[f"net/data/weights/{name}"] = pickled(Runs(mark))
    with pytest.raises(InputError, match="is no export"):
        read_pt2(write(tmp_path / "e.pt2", files))
    assert not mark.exists()


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.load",
        "torch.ops.load_library",
        "torch.ops.aten.save.default",
        "torch.hub.load",
        "_operator.call",
        "_operator.attrgetter",
        "math.factorial",
        "builtins.eval",
        "#aoti:x",
    ],
)
def test_only_ops_are_called(good, tmp_path, target):
    """Functions of torch, of Python and of TorchScript are none."""
    mark = tmp_path / "ran"

    def call(data):
        argument = {"name": "", "arg": {"as_string": f"touch {mark}"}, "kind": 1}
        nodes_of(data)[0].update(target=target, inputs=[argument])

    with pytest.raises(InputError, match="no op that torch knows"):
        read_pt2(write(tmp_path / "e.pt2", change(good, "models/model.json", call)))
    assert not mark.exists()


@pytest.mark.parametrize(
    "size",
    [
        "open('{mark}', 'w')",
        "__import__('os').system('touch {mark}')",
        "Symbol('s0').__class__.__base__",
        "(lambda: open('{mark}', 'w'))()",
        "[open('{mark}', 'w') for x in '1']",
        "Symbol('s0', open('{mark}', 'w'))",
        "9**9**9**9",
        "Pow(Pow(Pow(Pow(Pow(9, 9), 9), 9), 9), 9)",
        "(" * 5000 + ")" * 5000,
        "",
    ],
)
def test_sizes_are_arithmetic(good, tmp_path, size):
    """Anything else in their place is refused, not evaluated."""
    mark = tmp_path / "ran"
    name = next(name for name in good if name.endswith("models/model.json"))
    data = json.loads(good[name])
    dim = data["graph_module"]["graph"]["tensor_values"]["relu"]["sizes"][0]
    dim["as_expr"]["expr_str"] = size.replace("{mark}", str(mark))
    with pytest.raises(InputError, match="no arithmetic"):
        read_pt2(write(tmp_path / "e.pt2", {**good, name: json.dumps(data).encode()}))
    assert not mark.exists()


def test_modules_named_in_the_structure_of_inputs_are_not_imported(good, tmp_path, monkeypatch):
    """torch imports what a serialized enum names."""
    (tmp_path / "ran_me.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    enum = json.dumps({"__enum__": True, "fqn": "ran_me:A", "name": "B"})
    spec = json.dumps([1, {"type": "builtins.dict", "context": f"[{enum}]", "children_spec": []}])

    def name_module(data):
        data["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = spec

    read_pt2(write(tmp_path / "e.pt2", change(good, "models/model.json", name_module)))


def test_weights_of_other_sizes_than_the_graph_are_refused(good, tmp_path):
    """One of the two is damaged."""

    def shrink(data):
        data["config"]["0.bias"]["tensor_meta"]["sizes"] = [{"as_int": 3}]

    with pytest.raises(InputError, match=r"'0\.bias' is \(4,\) in the graph and \(3,\)"):
        read_pt2(write(tmp_path / "e.pt2", change(good, "model_weights_config.json", shrink)))


def test_libraries_in_the_file_are_not_loaded(good, tmp_path):
    """Compiled models may lie beside the graph."""
    files = {**good, "net/data/aotinductor/model/x.so": b"\x7fELF"}
    assert read_pt2(write(tmp_path / "e.pt2", files)).ops


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[]", b"{}", b"\xff\xfe", b'"x"', b"null"])
def test_other_json_is_refused(good, tmp_path, data):
    """Deep, empty, or no text."""
    name = next(name for name in good if name.endswith("models/model.json"))
    with pytest.raises(InputError, match="is no export"):
        read_pt2(write(tmp_path / "e.pt2", {**good, name: data}))
