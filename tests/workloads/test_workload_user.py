"""Workloads from the user's own files: what is accepted and how mistakes are reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from devplace import workloads
from devplace.errors import InputError

MODEL = """
import torch
from torch import nn

def loss_fn(model, x, y):
    return nn.functional.mse_loss(model(x), y)

def parts(width=3, batch=2, device=None):
    model = nn.Linear(width, 1, device=device)
    x = torch.randn(batch, width, device=device)
    return model, (x, torch.zeros(batch, 1, device=device)), loss_fn
"""

FIRST_LINE = MODEL.count("\n") + 1  # of what `write` adds


@pytest.fixture(autouse=True)
def _restored_path() -> Iterator[None]:
    """Loading puts the file's folder on sys.path; take it off again."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def write(folder: Path, body: str, name: str = "mine.py") -> str:
    """A file with the helpers above and `body`; its path."""
    path = folder / name
    path.write_text(MODEL + body)
    return str(path)


def message_of(spec: str, **arguments: object) -> str:
    """The text of the InputError that loading gives; always one line."""
    with pytest.raises(InputError) as caught:
        workloads.load(spec, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_function_without_arguments_is_loaded_on_meta(tmp_path: Path) -> None:
    """A function that takes nothing builds without memory, however large its model is."""
    file = write(tmp_path, "def build():\n    return parts(width=10**12)\n")
    workload = workloads.load(f"{file}:build")
    assert workload.name == f"{file}:build"
    assert workload.model.weight.is_meta
    assert workload.inputs[0].shape == (2, 10**12)


def test_function_without_arguments_is_loaded_on_cpu(tmp_path: Path) -> None:
    """On the CPU the same function gives values, and its loss runs."""
    file = write(tmp_path, "def build():\n    return parts()\n")
    workload = workloads.resolve(f"{file}:build", device="cpu")
    assert torch.isfinite(workload.loss_fn(workload.model, *workload.inputs))


def test_keywords_are_passed_on(tmp_path: Path) -> None:
    """size, batch and device reach a function that takes them."""
    body = (
        "def build(size, batch=2, *, device):\n"
        "    return parts(3 if size == 'small' else 300, batch, device)\n"
    )
    file = write(tmp_path, body)
    workload = workloads.load(f"{file}:build", "small", batch=5, device="cpu")
    assert workload.inputs[0].shape == (5, 3)
    assert workloads.load(f"{file}:build", batch=7).inputs[0].shape == (7, 300)


def test_catch_all_keywords_get_everything(tmp_path: Path) -> None:
    """A function with ** is passed size, device and, if given, batch."""
    file = write(tmp_path, "def build(**k):\n    return parts(batch=len(k), device=k['device'])\n")
    assert workloads.load(f"{file}:build").inputs[0].shape[0] == 2
    assert workloads.load(f"{file}:build", batch=1).inputs[0].shape[0] == 3


def test_unasked_batch_leaves_the_functions_own(tmp_path: Path) -> None:
    """Without a batch the function's default holds; without that too, it is passed None."""
    file = write(tmp_path, "def build(batch=6):\n    return parts(batch=batch)\n")
    assert workloads.load(f"{file}:build").inputs[0].shape[0] == 6
    body = "def build(batch):\n    assert batch is None\n    return parts()\n"
    assert workloads.load(f"{write(tmp_path, body)}:build").inputs[0].shape[0] == 2


def test_values_read_while_building_are_real(tmp_path: Path) -> None:
    """Code that reads a tensor's value cannot run on meta; it is run on the CPU, then emptied."""
    body = (
        "def build():\n"
        "    width = int(torch.tensor([3, 4]).sum().item())\n"
        "    model, inputs, loss = parts(width)\n"
        "    tied = nn.Sequential(model, nn.Linear(1, width), nn.Linear(width, 1))\n"
        "    tied[2].weight = model.weight\n"
        "    return tied, inputs, loss\n"
    )
    file = write(tmp_path, body)
    workload = workloads.load(f"{file}:build")
    assert workload.model[0].weight.is_meta
    assert workload.model[0].weight.shape == (1, 7)
    assert workload.model[2].weight is workload.model[0].weight
    assert all(x.is_meta for x in workload.inputs)


def test_frozen_parameters_and_buffers_survive_emptying(tmp_path: Path) -> None:
    """What is made on the CPU for meta keeps requires_grad, dtypes and shared buffers."""
    body = (
        "def build(device):\n"
        "    model = nn.BatchNorm1d(3)\n"
        "    model.weight.requires_grad_(False)\n"
        "    model.register_buffer('again', model.running_mean)\n"
        "    return model, [torch.ones(2, 3, dtype=torch.float64)], lambda m, x: m(x).sum()\n"
    )
    file = write(tmp_path, body)
    workload = workloads.load(f"{file}:build")
    model = workload.model
    assert not model.weight.requires_grad
    assert model.bias.requires_grad
    assert model.again is model.running_mean
    assert model.num_batches_tracked.dtype == torch.int64
    assert workload.inputs[0].is_meta
    assert workload.inputs[0].dtype == torch.float64


def test_seed_decides_and_callers_state_is_untouched(tmp_path: Path) -> None:
    """Weights repeat by seed, and the global generator is left as it was."""
    file = write(tmp_path, "def build():\n    return parts()\n")
    before = torch.get_rng_state()
    first, second, other = (
        workloads.load(f"{file}:build", device="cpu", seed=seed).model.weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_built_in_workload_may_be_returned(tmp_path: Path) -> None:
    """A function may change a built-in workload and return it as it is."""
    body = (
        "from devplace import workloads\n"
        "def build(batch=None, device='meta'):\n"
        "    return workloads.build('rnnlm', 'small', batch, device, layers=3)\n"
    )
    file = write(tmp_path, body)
    workload = workloads.load(f"{file}:build", batch=2)
    assert len(workload.model.cells) == 3
    assert workload.inputs[0].shape[0] == 2


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    """A second load sees what the file says now."""
    file = write(tmp_path, "def build():\n    return parts(3)\n")
    assert workloads.load(f"{file}:build").inputs[0].shape[1] == 3
    write(tmp_path, "def build():\n    return parts(width=444)\n")
    assert workloads.load(f"{file}:build").inputs[0].shape[1] == 444


def test_neighbouring_file_can_be_imported(tmp_path: Path) -> None:
    """The file's folder is on the path, as when Python runs the file."""
    (tmp_path / "devplace_test_neighbour.py").write_text("WIDTH = 9\n")
    body = "def build():\n    from devplace_test_neighbour import WIDTH\n    return parts(WIDTH)\n"
    file = write(tmp_path, body)
    assert workloads.load(f"{file}:build").inputs[0].shape[1] == 9


def test_missing_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    """A missing file is reported, with a neighbour of nearly the same name."""
    write(tmp_path, "")
    message = message_of(f"{tmp_path}/mien.py:build")
    assert "no file" in message
    assert "Did you mean 'mine.py'?" in message


def test_missing_function_is_named_with_the_nearest(tmp_path: Path) -> None:
    """A missing function is reported with the functions that are there."""
    file = write(tmp_path, "def build():\n    return parts()\n")
    message = message_of(f"{file}:biuld")
    assert "'biuld' is missing" in message
    assert "Did you mean 'build'?" in message
    assert "loss_fn, parts, build" in message
    assert "'MODEL' is not a function" in message_of(write(tmp_path, "MODEL = 1\n") + ":MODEL")


@pytest.mark.parametrize("ending", ["", ":"])
def test_spec_without_function_lists_those_there(tmp_path: Path, ending: str) -> None:
    """`file.py` alone is told how to name a function, without running the file."""
    file = write(tmp_path, "raise SystemExit\n")
    with pytest.raises(InputError, match=r"names no function.*file\.py:function.*loss_fn, parts"):
        workloads.resolve(file + ending)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return parts()[:1]", "a tuple of 1, expected 2 or 3"),
        ("return None", "returned None, expected 2 or 3"),
        ("return [1, 2, 3]", "returned a list, expected 2 or 3"),
        ("return 5, (), loss_fn", "an int as the model"),
        ("return parts()[0], torch.ones(2), loss_fn", "a Tensor as the inputs"),
        ("return parts()[0], (), 'mse'", "a str as the loss function"),
    ],
)
def test_wrong_return_says_what_is_expected(tmp_path: Path, body: str, words: str) -> None:
    """Anything but model, inputs and loss is reported with what came and what should."""
    message = message_of(write(tmp_path, f"def build():\n    {body}\n") + ":build")
    assert words in message
    assert "Return (model, inputs, loss_fn)" in message


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_exception_in_the_function_names_file_and_line(tmp_path: Path, device: str) -> None:
    """An exception is one line: the user's file and line, even if torch raised it deeper."""
    body = "def build():\n    x = torch.ones(2, 3)\n    return x @ x\n"
    file = write(tmp_path, body)
    line = Path(file).read_text().splitlines().index("    return x @ x") + 1
    message = message_of(f"{file}:build", device=device)
    assert message.startswith(f"{file}:{line}: RuntimeError: ")
    assert "calling build()" in message


def test_exception_at_import_names_file_and_line(tmp_path: Path) -> None:
    """What goes wrong while the file is imported is reported with its line."""
    message = message_of(write(tmp_path, "import no_such_module_here\n") + ":build")
    expected = f":{FIRST_LINE}: ModuleNotFoundError: No module named 'no_such_module_here'"
    assert expected in message
    assert "importing" in message


def test_syntax_error_names_its_line(tmp_path: Path) -> None:
    """A syntax error names the line it is on."""
    message = message_of(write(tmp_path, "def build(:\n") + ":build")
    assert f":{FIRST_LINE}: SyntaxError: " in message


def test_exit_is_reported_not_obeyed(tmp_path: Path) -> None:
    """A script that parses arguments and exits does not end devplace."""
    message = message_of(write(tmp_path, "raise SystemExit(2)\n") + ":build")
    assert f":{FIRST_LINE}: SystemExit: it exits with 2" in message


@pytest.mark.parametrize("parameter", ["hidden", "size, /", "*, depth"])
def test_foreign_arguments_are_refused(tmp_path: Path, parameter: str) -> None:
    """An argument that devplace cannot pass must have a default."""
    file = write(tmp_path, f"def build({parameter}):\n    return parts()\n")
    message = message_of(f"{file}:build")
    assert "needs the argument" in message
    assert "size, batch, device" in message


@pytest.mark.parametrize(
    ("arguments", "word"), [({"batch": 8}, "batch=8"), ({"size": "small"}, "size=small")]
)
def test_wishes_that_cannot_be_passed_are_refused(
    tmp_path: Path, arguments: dict[str, object], word: str
) -> None:
    """A batch or small size is not dropped in silence where the function takes none."""
    file = write(tmp_path, "def build():\n    return parts()\n")
    message = message_of(f"{file}:build", **arguments)
    assert word in message
    assert "Add the keyword" in message


def test_meta_tensors_for_a_real_device_are_refused(tmp_path: Path) -> None:
    """A function that builds on meta although values are wanted is told to use the device."""
    file = write(tmp_path, "def build():\n    return parts(device='meta')\n")
    message = message_of(f"{file}:build", device="cpu")
    assert "tensors on device meta, expected values on cpu" in message


def test_wrong_size_or_batch_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Size and batch are checked as for built-in workloads."""
    file = write(tmp_path, "raise SystemExit\n")
    assert "Did you mean 'small'?" in message_of(f"{file}:build", size="smal")
    assert "batch must be a positive number" in message_of(f"{file}:build", batch=-1)
    assert "Unknown device 'tpu9x'" in message_of(f"{file}:build", device="tpu9x")


def test_resolve_builds_by_name() -> None:
    """A spec without a file is a built-in workload."""
    assert workloads.resolve("nmt-2", "small", batch=2).inputs[0].shape == (2, 4)
    with pytest.raises(InputError, match="Did you mean 'nmt-2'"):
        workloads.resolve("nmt2")


def test_whatever_a_function_raises_is_one_line(tmp_path: Path) -> None:
    """Also what is no `Exception`, has no text, or comes of looking the function up."""
    text = "class Odd(BaseException):\n    pass\n\ndef build(size=None):\n    raise {}\n"
    message = message_of(write(tmp_path, text.format("Odd('no')")) + ":build")
    assert "Odd: no (while calling build(size='full'))" in message
    message = message_of(write(tmp_path, text.format("AssertionError")) + ":build")
    assert "AssertionError (while" in message
    lookup = "def __getattr__(name):\n    raise RuntimeError(name)\n"
    message = message_of(write(tmp_path, lookup) + ":build")
    assert "RuntimeError: build (while looking up build)" in message


def test_keyword_inputs_have_texts_as_keys(tmp_path: Path) -> None:
    """The key that is none is named."""
    text = "def build():\n    return torch.nn.Linear(2, 2), {0: torch.ones(2)}, print\n"
    assert "inputs with the key 0" in message_of(write(tmp_path, text) + ":build")


RELATIVE = "from {where} import parts\n\ndef build():\n    return parts()\n"


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """Modules of packages that a test has imported are forgotten."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mypkg", "plain", "json_like"):
            del sys.modules[name]


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("has_init", [True, False])
@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("mypkg/train.py", ".net"),
        ("mypkg/deep/train.py", "..net"),
        ("mypkg/deep/train.py", "mypkg.net"),
        ("mypkg/__init__.py", ".net"),
    ],
)
@pytest.mark.parametrize("is_dotted", [True, False])
def test_modules_of_packages_import_their_like(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_init: bool,
    file: str,
    where: str,
    is_dotted: bool,
) -> None:
    """By file or by module name, relatively or not, with `__init__.py` or without."""
    if not has_init and (where == "mypkg.net" or "__init__" in file):
        pytest.skip("nothing says that it is a package")
    (tmp_path / "mypkg" / "deep").mkdir(parents=True)
    if has_init:
        for folder in ("mypkg", "mypkg/deep"):
            (tmp_path / folder / "__init__.py").touch()
    write(tmp_path / "mypkg", "", "net.py")
    (tmp_path / file).write_text(RELATIVE.format(where=where))
    monkeypatch.chdir(tmp_path)
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for _ in range(2):  # a file that was loaded before is run again
        workload = workloads.load(f"{name if is_dotted else file}:build", device="cpu")
        assert workload.inputs[0].shape == (2, 3)


@pytest.mark.usefixtures("_forgotten")
def test_another_package_of_the_same_name_is_told(tmp_path: Path) -> None:
    """A package that hides the user's, as one of the standard library, is named."""
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").touch()
    (tmp_path / "json" / "train.py").write_text("def build():\n    pass\n")
    message = message_of(str(tmp_path / "json" / "train.py") + ":build")
    assert "'json' is found at" in message
    assert "Rename one of them" in message


def test_a_script_may_parse_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its top or in the function; it sees none, so that its defaults hold."""
    monkeypatch.setattr(sys, "argv", ["devplace", "plan", "--machine", "cpux2"])
    body = (
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--width', type=int, default=7)\n"
        "width = parser.parse_args().width\n"
        "def build():\n    return parts(parser.parse_args().width + width)\n"
    )
    workload = workloads.load(f"{write(tmp_path, body)}:build", device="cpu")
    assert workload.inputs[0].shape == (2, 14)
    assert sys.argv[0] == "devplace"


def test_a_module_that_is_not_there_is_told() -> None:
    """As a file that is not there."""
    assert "no file or module 'nosuch.train'" in message_of("nosuch.train:build")
