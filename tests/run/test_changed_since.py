"""What the user changes after capture is seen by the next step, or harmless."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from devplace.errors import ExecutionError, InputError, PlanMismatchError
from tests.run.placed import adam, at_random, largest_difference, make_step, sgd, train_eager


class Scaled(nn.Module):
    """Reads plain attributes of several kinds, and leaves some behind."""

    kind = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(5, 3)
        self.scale = 1.0
        self.pair = (1.0, "a")
        self.weights = [1.0, 2.0]
        self.config = SimpleNamespace(factor=1.0, comment="")
        self.unread = 3
        self.calls = 0
        self.rows = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.rows = x.shape[0]
        hidden = self.drop(self.norm(self.first(x)).relu()) * self.rows
        return self.head(hidden) * self.scale * self.pair[0] * self.weights[1] * self.factor()

    def factor(self) -> float:
        return self.config.factor * self.kind


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def batch() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


def made(model: Any, loss: Any = loss_fn, make: Any = sgd) -> tuple[Any, Any]:
    optimizer = make(list(model.parameters()))
    return make_step(model, batch(), loss, optimizer, at_random(0)), optimizer


def linear() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 2.0), ("pair", (2.0, "a")), ("kind", 2.0), ("weights", [1.0, 3.0])],
)
def test_an_attribute_that_the_step_reads_must_stay(name: str, value: Any) -> None:
    """Of an object, of its class, a tuple or a list: eager mode would compute something else."""
    model = Scaled()
    step, _ = made(model)
    was = getattr(model, name)
    setattr(model, name, value)
    with pytest.raises(PlanMismatchError, match=rf"attribute '{name}(\[.\])?' of the model is"):
        step(*batch())
    setattr(model, name, was)
    step(*batch())


def test_attributes_of_parts_and_of_objects_in_the_model_must_stay() -> None:
    """The probability of a dropout, the momentum of a norm, a list changed in place, a config."""
    model = Scaled()
    step, _ = made(model)
    changes = ((model.drop, "p", 0.5), (model.norm, "momentum", 0.3), (model.config, "factor", 2.0))
    for owner, name, value in changes:
        was = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(PlanMismatchError, match=f"{name}.*captured with {was}"):
            step(*batch())
        setattr(owner, name, was)
    model.weights[1] = 5.0
    with pytest.raises(PlanMismatchError, match="weights"):
        step(*batch())
    model.weights[1] = 2.0
    step(*batch())


def test_what_the_step_does_not_read_may_change() -> None:
    """Counters, what forward writes first, attributes nobody reads, modes that decide nothing."""
    model = Scaled()
    step, _ = made(model)
    assert model.calls == 0
    model.calls, model.rows, model.unread, model.config.comment = 9, 77, 4, "other"
    model.first.eval()
    model.head.eval()
    step(*batch())
    model.train()
    step(*batch())
    step.sync()
    model.eval()
    model(batch()[0][:2])
    model.train()
    step(*batch())


def test_variables_of_the_loss_function_must_stay() -> None:
    """The weight of a loss term in a closure, an options object or a dict, however it is named."""
    beta, options, weights = 0.5, SimpleNamespace(gamma=1.0, epoch=0), {"kl": 1.0}

    def loss(model: Any, x: Any, y: Any) -> Any:
        return loss_fn(model, x, y) * beta * options.gamma * weights["kl"]

    step, _ = made(linear(), loss)
    step(*batch())
    options.epoch = 1
    step(*batch())
    beta = 0.6
    with pytest.raises(PlanMismatchError, match=r"'beta' is 0\.6.*captured with 0\.5"):
        step(*batch())
    beta, options.gamma = 0.5, 2.0
    with pytest.raises(PlanMismatchError, match=r"'options\.gamma' is 2\.0"):
        step(*batch())
    options.gamma, weights["kl"] = 1.0, 0.1
    with pytest.raises(PlanMismatchError, match=r"weights\['kl'\].* is 0\.1"):
        step(*batch())


class Trainer:
    """Keeps what a loss is made of, and what changes in every step."""

    def __init__(self) -> None:
        self.steps = 0
        self.kl = 1.0
        self.criterion = nn.CrossEntropyLoss()

    def loss(self, model: Any, x: Any, y: Any) -> Any:
        return self.criterion(model(x), y) * self.kl


def test_attributes_of_a_trainer_are_fixed_as_far_as_its_loss_reads_them() -> None:
    """A counter of steps beside them may change, an option of a loss module may not."""
    trainer = Trainer()
    step, _ = made(linear(), trainer.loss)
    trainer.steps += 1
    step(*batch())
    trainer.kl = 2.0
    with pytest.raises(PlanMismatchError, match=r"self\.kl"):
        step(*batch())
    trainer.kl, trainer.criterion.label_smoothing = 1.0, 0.2
    with pytest.raises(PlanMismatchError, match="label_smoothing"):
        step(*batch())


def test_weights_that_were_written_to_are_not_ignored() -> None:
    """The step would go on with its own; `load` takes the new ones, `sync` overwrites them."""
    model = linear()
    step, _ = made(model)
    step(*batch())
    with torch.no_grad():
        model[0].weight.clamp_(-0.01, 0.01)
    with pytest.raises(PlanMismatchError, match=r"'0\.weight'.*step\.load\(\)"):
        step(*batch())
    step.sync()
    step(*batch())
    model.load_state_dict(linear().state_dict())
    with pytest.raises(PlanMismatchError, match="written to"):
        step(*batch())
    step.load()
    assert float(step(*batch())) == pytest.approx(
        float(loss_fn(linear(), *batch()).detach()), rel=1e-5
    )


def test_weights_put_back_after_evaluation_do_no_harm() -> None:
    """Averaged weights are often swapped in to evaluate, between `sync` and the next step."""
    model = linear()
    step, _ = made(model)
    step(*batch())
    step.sync()
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(linear().state_dict())
    model.load_state_dict(kept)
    step(*batch())


def test_steps_over_one_model_take_turns() -> None:
    """A step whose weights another one has trained since refuses to go on with old ones."""
    model = linear()
    one, optimizer = made(model)
    other = make_step(model, batch(), loss_fn, optimizer, at_random(1))
    twin = linear()
    expected = train_eager(twin, sgd(list(twin.parameters())), [batch()] * 4, loss_fn)
    found = []
    for step in (one, other, one, other):
        if step.steps_done != len(found):
            with pytest.raises(PlanMismatchError, match="written to"):
                step(*batch())
            step.load()
        found.append(float(step(*batch())))
        step.sync()
    assert found == pytest.approx(expected, rel=1e-5)
    assert largest_difference(model, twin) < 1e-5


def gan() -> tuple[Any, Any, Any, list[Any]]:
    """A model of generator and critic with a step for each, and its batches."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"made": nn.Linear(4, 4), "critic": nn.Linear(4, 1)}).double()
    x, z = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    return model, critic_loss, made_loss, [(x, z), (z,)]


def critic_loss(m: Any, x: Any, z: Any) -> Any:
    return (m["critic"](m["made"](z).detach()) - m["critic"](x)).square().mean()


def made_loss(m: Any, z: Any) -> Any:
    return m["critic"](m["made"](z)).square().mean()


def test_a_step_refuses_weights_that_another_step_has_trained() -> None:
    """Two steps of a GAN, neither synced: the second would go on with an old critic."""
    model, critic, generator, (first, second) = gan()
    twin = copy.deepcopy(model)
    optimizers = [sgd(list(model[n].parameters())) for n in ("critic", "made")]
    one = make_step(model, first, critic, optimizers[0], at_random(0))
    two = make_step(model, second, generator, optimizers[1], at_random(1))
    one(*first)
    with pytest.raises(PlanMismatchError, match=r"take turns: .*'critic\.weight'.* sync\(\)"):
        two(*second)
    one.sync()
    with pytest.raises(PlanMismatchError, match="written to"):
        two(*second)
    two.load()
    two(*second)
    with pytest.raises(PlanMismatchError, match=r"take turns: .*'made\.weight'"):
        one(*first)
    two.sync()
    one.load()
    one(*first)
    one.sync()
    others = [sgd(list(twin[n].parameters())) for n in ("critic", "made")]
    for k, loss, data in ((0, critic, first), (1, generator, second), (0, critic, first)):
        train_eager(twin, others[k], [data], loss)
    assert largest_difference(model, twin) < 1e-12


def test_weights_beside_the_model_are_as_new_as_those_in_it() -> None:
    """The generator's step reads a critic of a closure, frozen while it is captured."""
    model, _, _, (first, second) = gan()
    made_by, critic = model["made"], model["critic"]
    twin = copy.deepcopy(model)
    one = make_step(
        critic,
        first,
        lambda m, x, z: (m(made_by(z).detach()) - m(x)).square().mean(),
        sgd(list(critic.parameters())),
        at_random(0),
    )
    critic.requires_grad_(False)
    two = make_step(
        made_by,
        second,
        lambda m, z: critic(m(z)).square().mean(),
        sgd(list(made_by.parameters())),
        at_random(1),
    )
    critic.requires_grad_(True)
    one(*first)
    with pytest.raises(PlanMismatchError, match=r"take turns: .*'weight'.* sync\(\)"):
        two(*second)
    one.sync()
    with pytest.raises(PlanMismatchError, match="written to"):
        two(*second)
    two.load()
    two(*second)
    two.sync()
    one.load()
    one(*first)
    one.sync()
    others = [sgd(list(twin[n].parameters())) for n in ("critic", "made")]
    for k, loss, data in ((0, critic_loss, first), (1, made_loss, second), (0, critic_loss, first)):
        train_eager(twin, others[k], [data], loss)
    assert largest_difference(model, twin) < 1e-12


def test_steps_that_share_nothing_trained_do_not_wait_for_each_other() -> None:
    """Nor for one that is closed or gone, nor for one that only evaluates."""
    model, critic, generator, (first, second) = gan()
    one = make_step(model, first, critic, sgd(list(model["critic"].parameters())), at_random(0))
    other, _ = made(linear())
    other(*batch())
    one(*first)
    evaluate = make_step(model, second, generator, None, at_random(1))
    with pytest.raises(PlanMismatchError, match="take turns"):
        evaluate(*second)
    one.close()
    evaluate(*second)
    evaluate(*second)


def test_a_teacher_that_was_updated_is_not_ignored() -> None:
    """Tensors outside the model are constants of a step, until `load` reads them again."""
    model, teacher = linear(), linear()

    def loss(model: Any, x: Any, y: Any) -> Any:
        return loss_fn(model, x, y) + F.mse_loss(model(x), teacher(x).detach())

    step, _ = made(model, loss)
    step(*batch())
    step.sync()
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)
    with pytest.raises(PlanMismatchError, match=r"outside the model.*step\.sync.*step\.load"):
        step(*batch())
    step.load()
    expected = float(loss(model, *batch()).detach())
    assert float(step(*batch())) == pytest.approx(expected, rel=1e-5)


def test_parts_and_parameters_put_in_place_of_others_are_seen() -> None:
    """A new head, or weights loaded with assign=True, belong to no step; `sync` writes nothing."""
    model = linear()
    step, optimizer = made(model)
    step(*batch())
    head = model[2]
    model[2] = nn.Linear(5, 3)
    for call in (step.sync, lambda: step(*batch())):
        with pytest.raises(PlanMismatchError, match="module '2' was replaced"):
            call()
    model[2] = head
    step(*batch())
    model.load_state_dict(linear().state_dict(), assign=True)
    before = len(optimizer.state)
    for call in (step.sync, step.load, lambda: step(*batch())):
        with pytest.raises(PlanMismatchError, match=r"'0\.weight'"):
            call()
    assert len(optimizer.state) == before


def test_sync_under_inference_mode_leaves_ordinary_tensors() -> None:
    """Evaluation code often runs under it; training goes on afterwards, in any way."""
    model = linear()
    step, optimizer = made(model, make=adam)
    with torch.inference_mode():
        step.load()
        loss = step(*batch())
        step.sync()
    state = [t for one in optimizer.state.values() for t in one.values()]
    assert not any(t.is_inference() for t in [loss, *model.parameters(), *state])
    step(*batch())
    step.sync()
    train_eager(model, optimizer, [batch()], loss_fn)


def test_another_default_device_or_dtype_changes_no_state() -> None:
    """`torch.set_default_device` is for what the user makes, not for state of a step; so is the
    default dtype while a step is loaded and synced."""
    model = linear()
    optimizer = adam(list(model.parameters()))
    step = make_step(model, batch(), loss_fn, optimizer, at_random(0))
    with torch.device("meta"):
        with default_dtype(torch.float64):
            step.load()
        step(*(t.cpu() for t in (torch.randn(6, 4, device="cpu"), batch_targets())))
        with default_dtype(torch.float64):
            step.sync()
    assert {t.device.type for one in optimizer.state.values() for t in one.values()} == {"cpu"}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Changes the default dtype, and puts it back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def batch_targets() -> Any:
    return torch.zeros(6, dtype=torch.int64, device="cpu")


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_no_leaf_on_a_cpu_can_use_do_not_break_sync(option: str) -> None:
    """A model on the CPU may be given an optimizer made for a GPU's graphs."""
    model = linear()
    optimizer = torch.optim.Adam(model.parameters(), **{option: True})
    step = make_step(model, batch(), loss_fn, optimizer, at_random(0))
    step(*batch())
    step.sync()
    assert {float(one["step"]) for one in optimizer.state.values()} == {1.0}


def test_a_step_is_not_copied_or_pickled() -> None:
    """The message says what to save instead."""
    step, _ = made(linear())
    attempts = (
        lambda: copy.deepcopy(step),
        lambda: copy.copy(step),
        lambda: pickle.dumps(step),
        lambda: torch.save({"step": step}, io.BytesIO()),
    )
    for attempt in attempts:
        with pytest.raises(InputError, match=r"state_dict\(\)"):
            attempt()
    step(*batch())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_gets_an_error_and_no_hang() -> None:
    """The threads of a step stay in the process that made it."""
    step, _ = made(linear())
    child = os.fork()
    if child == 0:
        try:
            step(*batch())
        except ExecutionError as error:
            os._exit(7 if "forked process" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    step(*batch())


def test_threads_may_capture_at_once() -> None:
    """A trace changes what is torch's for the whole process, so one waits for the other."""
    found: list[Any] = []
    models = [linear() for _ in range(3)]
    inputs = batch()

    def work(model: Any) -> None:
        optimizer = sgd(list(model.parameters()))
        step = make_step(model, inputs, loss_fn, optimizer, at_random(0))
        found.append(float(step(*inputs)))
        step.close()

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1


def test_sparse_and_meta_batches_are_refused() -> None:
    """They have the shape and dtype of the example, but cannot be copied to a device."""
    step, _ = made(linear())
    x, y = batch()
    with pytest.raises(InputError, match=r"dense: '0' is torch\.sparse_coo"):
        step(x.to_sparse(), y)
    with pytest.raises(InputError, match="'0' is on the meta device"):
        step(x.to("meta"), y)
    step(x, y)


def test_state_of_the_optimizer_that_is_written_or_loaded_is_seen() -> None:
    """Before there is any, after a sync, and where other tensors take its place."""
    step, optimizer = made(model := linear(), make=adam)
    with step:
        step(*batch())
        step.sync()
        step(*batch())
        step.sync()
        optimizer.state[model[0].weight]["exp_avg"].fill_(5.0)
        with pytest.raises(PlanMismatchError, match=r"optimizer's state of '0.weight'"):
            step(*batch())
        step.load()
        step(*batch())
        step.sync()
        assert float(optimizer.state[model[0].weight]["exp_avg"].min()) > 4
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with pytest.raises(PlanMismatchError, match="optimizer's state of"):
            step(*batch())


def test_other_memory_assigned_to_data_is_seen() -> None:
    """As of averaged weights that are swapped in, or a model that is cast."""
    step, _ = made(model := linear())
    with step:
        step(*batch())
        step.sync()
        mine = model[0].weight.data
        model[0].weight.data = torch.zeros_like(mine)
        with pytest.raises(PlanMismatchError, match=r"parameter '0.weight'"):
            step(*batch())
        model[0].weight.data = mine
        step(*batch())
        step.sync()
        model.double()
        with pytest.raises(PlanMismatchError, match=r"parameter '0.weight'"):
            step(*batch())


def test_a_module_added_to_a_list_is_seen() -> None:
    """A model that goes through it would run it."""
    step, _ = made(model := linear())
    with step:
        model.append(nn.ReLU())
        with pytest.raises(PlanMismatchError, match=r"module '3' was added. Remove it"):
            step(*batch())
        del model[3]
        step(*batch())
