"""Inference graphs from saved torch exports."""

import logging
import zipfile

import pytest
import torch

from devplace.cost.analytic import Analytic
from devplace.errors import InputError
from devplace.machine import load_machine
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.step_capture.exported import read_pt2


class Network(torch.nn.Module):
    """Convolution, norm, a small perceptron, attention and a view of a part."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())

    def forward(self, x):
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        a, b = self.head(y).chunk(2, 1)
        q = y[:, None, None]
        return a + b, torch.nn.functional.scaled_dot_product_attention(q, q, q)


def save(path, model, *inputs, **options):
    """The export of a model as a file."""
    torch.export.save(torch.export.export(model, inputs, **options), str(path))
    return path


# torch reads what it wrote with forms it calls old itself
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The network in evaluation mode, with a batch of 2."""
    folder = tmp_path_factory.mktemp("exported")
    return save(folder / "net.pt2", Network().eval(), torch.zeros(2, 3, 16, 16))


def test_network_is_read(path):
    """Sources have their roles, ops their modules, flops and views, as capture gives them."""
    graph = read_pt2(path)
    ops = {op.target: op for op in graph.ops}
    conv = ops["aten.convolution.default"]
    assert conv.flops == 2 * (2 * 8 * 14 * 14) * (3 * 3 * 3)
    assert conv.module == "conv"
    assert ops["aten.addmm.default"].flops == 2 * 2 * 8 * 16
    assert ops["aten.addmm.default"].module == "head.0"
    assert ops["aten.scaled_dot_product_attention.default"].flops == 2 * 2 * 1 * 1 * 1 * 16
    assert any(op.is_view for op in graph.ops)
    roles = {op.name: op.role for op in graph.ops if op.is_source}
    assert roles["conv.weight"] == "parameter"
    assert roles["norm.running_mean"] == "buffer"
    assert [result.role for result in graph.results] == ["output", "output"]
    machine = load_machine("k40x2")
    problem = Problem(graph, machine, Analytic()(graph, machine))
    devices = problem.spaces.op_devices(
        torch.zeros(problem.core.tasks.num_tasks, dtype=torch.int32).numpy()
    )
    assert simulate(problem, Placement(devices)).makespan_ns > 0


def test_open_sizes_have_the_exported_value(tmp_path):
    """An export for any batch is planned for the one it was traced with."""
    batch = torch.export.Dim("batch")
    path = save(
        tmp_path / "open.pt2",
        Network().eval(),
        torch.zeros(4, 3, 16, 16),
        dynamic_shapes=({0: batch},),
    )
    graph = read_pt2(path)
    conv = next(op for op in graph.ops if op.target == "aten.convolution.default")
    assert graph.tensors[conv.outputs[0]].shape == (4, 8, 14, 14)


def test_buffers_that_change_are_replaced(tmp_path):
    """In training mode the running statistics have new values after the step."""
    graph = read_pt2(save(tmp_path / "t.pt2", Network().train(), torch.zeros(2, 3, 16, 16)))
    replaced = {result.name: graph.ops[result.replaces].name for result in graph.results[:3]}
    assert replaced["norm.running_mean"] == "norm.running_mean"


def test_what_cannot_be_read_is_named(tmp_path):
    """A missing file, one that is no export."""
    with pytest.raises(InputError, match="no file"):
        read_pt2(tmp_path / "none.pt2")
    path = tmp_path / "bad.pt2"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(InputError, match=r"bad\.pt2 is no export"):
        read_pt2(path)


def test_bodies_are_refused(tmp_path):
    """A branch at run time has a graph of its own."""

    class Branch(torch.nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    with pytest.raises(InputError, match="has a body"):
        read_pt2(save(tmp_path / "b.pt2", Branch(), torch.zeros(3)))


@pytest.mark.parametrize("change", ["no zip", "other sizes"])
def test_nothing_but_the_error_tells_of_a_damaged_file(path, tmp_path, change):
    """torch's own tracebacks of the file stay out of stderr, and its loggers as they were."""
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append
    loggers = [logging.getLogger(f"torch.{name}") for name in ("export", "_subclasses.fake_tensor")]
    bad = tmp_path / "bad.pt2"
    bad.write_bytes(b"PK no zip")
    if change == "other sizes":
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(bad, "w") as new:
            for name in old.namelist():
                data = old.read(name).replace(
                    *(b'[{"as_int": 16}, {"as_int": %d}]' % n for n in (8, 5))
                )
                new.writestr(name, data)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with pytest.raises(InputError, match="is no export"):
            read_pt2(bad)
        assert not seen
        assert not any(logger.filters for logger in loggers)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
