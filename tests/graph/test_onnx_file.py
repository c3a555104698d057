"""Inference graphs from ONNX files."""

from pathlib import Path

import numpy as np
import pytest

from devplace.cost.analytic import Analytic
from devplace.errors import InputError
from devplace.graph.onnx_file import module_of, read_onnx
from devplace.machine import load_machine
from devplace.problem import Problem

onnx = pytest.importorskip("onnx")
helper, kinds = onnx.helper, onnx.TensorProto


def weight(name, *shape, dtype=kinds.FLOAT, values=None):
    """A weight of zeros, or of the values."""
    number = np.int64 if dtype == kinds.INT64 else np.float32
    data = np.zeros(shape, number) if values is None else np.array(values, number)
    return helper.make_tensor(name, dtype, shape, data.reshape(-1))


def save(path, nodes, inputs, outputs, weights=()):
    """A model of those nodes; names with shapes make the inputs."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, kinds.FLOAT, shape) for name, shape in inputs],
        [helper.make_tensor_value_info(name, kinds.FLOAT, None) for name in outputs],
        list(weights),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    onnx.save(model, str(path))
    return path


@pytest.fixture
def network(tmp_path):
    """Convolution, activation, reshape, dense layer and a split, with an open batch."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="/layer1/layer1.0/conv1/Conv"),
        helper.make_node("Relu", ["c"], ["r"], name="/layer1/relu/Relu"),
        helper.make_node("Reshape", ["r", "to"], ["f"]),
        helper.make_node("Gemm", ["f", "l"], ["y"]),
        helper.make_node("Split", ["y"], ["a", "b"], axis=1, num_outputs=2),
    ]
    weights = [weight("w", 8, 3, 3, 3), weight("l", 8 * 14 * 14, 10)]
    weights.append(weight("to", 2, dtype=kinds.INT64, values=[0, -1]))
    return save(tmp_path / "net.onnx", nodes, [("x", ["n", 3, 16, 16])], ["a", "b"], weights)


def test_network_is_read(network):
    """Weights are sources, reshapes views, and sizes and flops those of the layers."""
    graph = read_onnx(network, batch=2)
    ops = {op.name: op for op in graph.ops}
    conv = ops["/layer1/layer1.0/conv1/Conv"]
    assert conv.flops == 2 * (2 * 8 * 14 * 14) * (3 * 3 * 3)
    assert (conv.target, conv.module) == ("onnx.convolution", "layer1.0.conv1")
    assert conv.bytes_read == 4 * (2 * 3 * 16 * 16 + 8 * 3 * 3 * 3)
    assert conv.bytes_written == 4 * 2 * 8 * 14 * 14
    assert ops["Gemm_3"].flops == 2 * 2 * 10 * 8 * 14 * 14
    view = ops["Reshape_2"]
    assert (view.is_view, view.flops, view.bytes_read) == (True, 0, 0)
    assert graph.tensors[view.outputs[0]].shape == (2, 8 * 14 * 14)
    assert [op.role for op in graph.ops if op.is_source] == ["parameter"] * 3 + ["input"]
    assert [result.name for result in graph.results] == ["a", "b"]
    assert graph.meta["mode"] == "inference"
    machine = load_machine("k40x2")
    assert Problem(graph, machine, Analytic()(graph, machine)).core.tasks.num_tasks == 4


def test_open_sizes_are_refused(network, tmp_path):
    """The batch can be given, other open sizes cannot."""
    with pytest.raises(InputError, match=r"dimension 0 of input 'x' is open \(n\).*--batch"):
        read_onnx(network)
    node = helper.make_node("Relu", ["x"], ["y"])
    path = save(tmp_path / "o.onnx", [node], [("x", [1, "length"])], ["y"])
    with pytest.raises(InputError, match="dimension 1 of input 'x' is open"):
        read_onnx(path, batch=2)


@pytest.mark.parametrize(
    ("node", "inputs", "weights", "flops"),
    [
        (("MatMul", ["x", "w"]), [5, 2, 3], [weight("w", 3, 7)], 2 * 5 * 2 * 7 * 3),
        (("Add", ["x", "w"]), [5, 2, 3], [weight("w", 3)], 30),
        (("Transpose", ["x"]), [5, 3], [], 0),
        (("ConvTranspose", ["x", "w"]), [1, 4, 5, 5], [weight("w", 4, 6, 2, 2)], 2 * 100 * 24),
        (
            ("LSTM", ["x", "w", "r"]),
            [7, 2, 3],
            [weight("w", 1, 16, 3), weight("r", 1, 16, 4)],
            2 * 7 * 2 * (16 * 3 + 16 * 4),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_flops(tmp_path, node, inputs, weights, flops):
    """A multiply-add counts two; what only moves data counts none."""
    kind, reads = node
    options = {"hidden_size": 4} if kind == "LSTM" else {}
    made = helper.make_node(kind, reads, ["y"], **options)
    graph = read_onnx(save(tmp_path / "f.onnx", [made], [("x", inputs)], ["y"], weights))
    assert graph.ops[-1].flops == flops


@pytest.mark.slow
def test_what_cannot_be_read_is_named(tmp_path):
    """Not ONNX, bodies, and tensors that nothing makes."""
    path = tmp_path / "x.onnx"
    with pytest.raises(InputError, match="No such file"):
        read_onnx(path)
    path.write_bytes(b"\x08\x07hello")
    with pytest.raises(InputError, match="not a whole ONNX model"):
        read_onnx(path)
    body = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["z"])],
        "body",
        [],
        [helper.make_tensor_value_info("z", kinds.FLOAT, [1])],
    )
    branch = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    flag = helper.make_tensor("c", kinds.BOOL, [], [True])
    with pytest.raises(InputError, match="is an If, whose body"):
        read_onnx(save(path, [branch], [("x", [1])], ["y"], [flag]))
    with pytest.raises(InputError, match=r"x\.onnx"):
        read_onnx(save(path, [helper.make_node("Relu", ["q"], ["y"])], [("x", [1])], ["y"]))
    with pytest.raises(InputError, match="no nodes"):
        read_onnx(save(path, [], [("x", [1])], ["x"]))


def test_names_are_made_unique(tmp_path):
    """Nodes may share a name, or have that of a weight."""
    nodes = [
        helper.make_node("Relu", ["x"], ["y"], name="same"),
        helper.make_node("Relu", ["y"], ["z"], name="same"),
        helper.make_node("Add", ["z", "w"], ["u"], name="w"),
    ]
    path = save(tmp_path / "n.onnx", nodes, [("x", [3])], ["u"], [weight("w", 3)])
    names = [op.name for op in read_onnx(path).ops]
    assert len(set(names)) == len(names) == 5


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("/conv1/Conv", "conv1"),
        (
            "/encoder/encoder.layer.0/encoder.layer.0.fc/MatMul",
            "encoder.layer.0.encoder.layer.0.fc",
        ),
        ("/blocks.0/attn/MatMul", "blocks.0.attn"),
        ("plain", ""),
    ],
)
def test_module_paths(name, module):
    """A node's scope in its name is the path of its module."""
    assert module_of(name) == module


def test_a_file_that_aborts_onnx_is_an_error():
    """Another process reads it; that it died is told."""
    with pytest.raises(InputError, match=r"aborts\.onnx"):
        read_onnx(Path(__file__).parent / "data" / "aborts.onnx")


def test_other_inputs_than_an_op_takes_are_named(tmp_path):
    """Not an IndexError of the formula for its flops."""
    node = helper.make_node("Einsum", ["x"], ["y"], name="e", equation="ij->ij")
    path = save(tmp_path / "x.onnx", [node], [("x", [2, 3])], ["y"])
    model = onnx.load(path)
    model.graph.node[0].op_type = "MatMulInteger"
    onnx.save(model, path)
    with pytest.raises(InputError, match=r"x\.onnx"):
        read_onnx(path)


@pytest.mark.parametrize("batch", [0, -1, 2**63])
def test_a_batch_out_of_range_is_refused(network, batch):
    """Before the file is read."""
    with pytest.raises(InputError, match=f"got {batch}"):
        read_onnx(network, batch=batch)
