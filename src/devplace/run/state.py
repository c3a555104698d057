"""Read parameters, buffers and optimizer state from the user's objects, and write them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from devplace.device_kinds import is_host
from devplace.errors import InputError, PlanMismatchError
from devplace.graph import Captured
from devplace.graph.program import Binding
from devplace.run.copies import laid_out
from devplace.step_capture.optimizers.several import as_one, kind_of, owner_of
from devplace.step_capture.refuse import unwrap

STORED_KINDS = ("parameter", "buffer", "state", "constant")


class _Made(NamedTuple):
    """Steps made; if not exact, at least so many."""

    steps: int
    is_exact: bool


class ModelState:
    """The user's model and optimizer, seen through the bindings of a captured step.

    Tied weights are one tensor under several names; it is read once and written in place, so they
    stay tied.

    Args:
        graph: The captured step.
        model: The user's model.
        optimizer: The user's optimizer, or None for inference.
        invent_seed: Seed of made-up values for tensors on the meta device; None refuses them.

    Raises:
        PlanMismatchError: A parameter or buffer is missing or has another shape or dtype, or the
            optimizer is another.
    """

    def __init__(
        self, graph: Captured, model: Any, optimizer: Any = None, invent_seed: int | None = None
    ) -> None:
        self._graph = graph
        self.model = unwrap(model)
        self._starts = steps_at_capture(graph)
        self.optimizer = as_one(optimizer)
        self._invent_seed = invent_seed
        self._check_optimizer()

    def read(self) -> dict[int, Any]:
        """Present value per source op; optimizer state not created yet reads as what it
        begins with.

        Returns:
            Source op -> tensor, without inputs and scalars: the user's own, or a copy if it is not
            laid out in memory as at capture.

        Raises:
            PlanMismatchError: Something is missing or has another shape or dtype than captured.
            InputError: A tensor is on the meta device, that is, has no values.
        """
        kinds = {binding.op: binding for binding in self._graph.program.bindings}
        return {op: self._real(kinds[op], value) for op, value in self.present().items()}

    def present(self) -> dict[int, Any]:
        """As `read`, but what is on the meta device is given as it is."""
        self._check_optimizer()
        tensors = self.named_tensors()
        values = {}
        for binding in self._graph.program.bindings:
            if binding.kind in STORED_KINDS:
                value = self._value(binding, tensors)
                self._check(binding, value)
                values[binding.op] = laid_out(value, binding.strides)
        return values

    @property
    def steps_before_capture(self) -> int:
        """Steps the optimizer had made when the graph was captured."""
        return max(self._starts.values(), default=0)

    def steps_since_capture(self, counted: int = 0) -> int:
        """How many more steps the optimizer has made than when the graph was captured.

        Negative if it has been reset or loaded from an earlier checkpoint.

        Args:
            counted: What the step itself counted. SGD does not count its steps, so for it this
                number holds, unless its momentum says that it has not made any.

        Raises:
            PlanMismatchError: Parameters of the step differ in this number.
        """
        if self.optimizer is None:
            return counted
        exact: dict[int, str] = {}
        least: dict[int, str] = {}
        for name, parameter in self._updated():
            made = self._steps_made(name, self.optimizer.state.get(parameter, {}))
            if made is not None:
                found = exact if made.is_exact else least
                found.setdefault(made.steps - self._starts.get(name, 0), name)
        first = next(iter(exact), max(counted, max(least, default=counted)))
        others = {k: name for k, name in exact.items() if k != first}
        others |= {k: name for k, name in least.items() if k > first}
        if others:
            (second, other), *_ = others.items()
            raise PlanMismatchError(
                f"All parameters must have made the same number of steps since capture: "
                f"{exact[first]!r} has made {first}, {other!r} {second}. Capture again, or load "
                f"one checkpoint."
            )
        return first

    def write(self, get: Callable[[int], Any], steps_since_capture: int) -> None:
        """Write updated values into model and optimizer, in place.

        All values are there, on the host if they belong there, before the first is written.

        Args:
            get: Source op -> its present value.
            steps_since_capture: How many steps the optimizer has made since capture.

        Raises:
            InputError: The model is on the meta device.
            PlanMismatchError: The optimizer does not train this model's parameters any more.
        """
        self._check_optimizer()
        replaced = self._graph.replaced
        tensors = self.named_tensors()
        bindings = [b for b in self._graph.program.bindings if b.op in replaced]
        for binding in bindings:
            if tensors[binding.key].is_meta:
                raise InputError(
                    f"A model on the meta device cannot hold values: {binding.key!r} is there. "
                    "Load weights before compiling the step."
                )
        with torch.no_grad():
            values = {b.op: _on_host_of(tensors[b.key], get(b.op)) for b in bindings}
            for binding in bindings:
                if binding.kind in ("parameter", "buffer"):
                    tensors[binding.key].copy_(values[binding.op])
                elif binding.kind == "state":
                    state = self.optimizer.state[tensors[binding.key]]
                    _put_state(state, str(binding.slot), values[binding.op], tensors[binding.key])
            if self.optimizer is not None:
                self._write_step_counts(steps_since_capture)

    @property
    def has_optimizer(self) -> bool:
        """Whether there is an optimizer."""
        return self.optimizer is not None

    def persistent(self) -> dict[str, Any]:
        """Parameters and buffers by the names of the model's state dict."""
        found = dict(self.model.named_parameters(remove_duplicate=False))
        for path, module in self.model.named_modules(remove_duplicate=False):
            for key, value in module._buffers.items():
                if value is not None and key not in module._non_persistent_buffers_set:
                    found[f"{path}.{key}" if path else key] = value
        return found

    def named_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer, with the names of their parameters."""
        names = {id(tensor): name for name, tensor in self.model.named_parameters()}
        return [
            {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in self.optimizer.param_groups
        ]

    def take_groups(self, named: Sequence[Mapping[str, Any]]) -> None:
        """Set learning rates and the like as `named_groups` had them."""
        for group, saved in zip(self.optimizer.param_groups, named, strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})

    def _check_optimizer(self) -> None:
        """The optimizer must be of the captured class and train this model's parameters."""
        update = _update_of(self._graph)
        if update is None or not update.rules:
            return
        kind = "none" if self.optimizer is None else kind_of(self.optimizer)
        if kind != update.kind:
            raise PlanMismatchError(
                f"The step must get the optimizer it was captured with: {update.kind}, got {kind}. "
                f"Pass that one, or capture again."
            )
        groups = [{id(p) for p in group["params"]} for group in self.optimizer.param_groups]
        named = self.named_tensors()
        for name, rule in update.rules.items():
            mine = groups[rule.group] if rule.group < len(groups) else set()
            if name in named and id(named[name]) not in mine:
                raise PlanMismatchError(
                    f"The optimizer must train this model's parameters in the captured groups: "
                    f"{name!r} is not in its group {rule.group}. Build it from this model."
                )

    def named_tensors(self) -> dict[str, Any]:
        """Parameters and buffers by every name they have."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        named.update(self.model.named_buffers(remove_duplicate=False))
        return named

    def _updated(self) -> Iterator[tuple[str, Any]]:
        """Parameters that the optimizer updates; the step may change frozen ones in place, too."""
        named, program = self.named_tensors(), self._graph.program
        for binding in program.bindings:
            is_replaced = binding.kind == "parameter" and binding.op in self._graph.replaced
            if is_replaced and program.trainable.get(binding.key, False):
                yield binding.key, named[binding.key]

    def _steps_made(self, name: str, state: Mapping[str, Any]) -> _Made | None:
        """What the optimizer's state tells of the steps of a parameter; None if nothing."""
        if "step" in state:
            return _Made(int(state["step"]), True)
        rule = _update_of(self._graph).rules[name]
        if not rule.counts_steps:
            has_begun = any(state.get(slot) is not None for slot in rule.state_slots)
            return _Made(int(has_begun), not has_begun) if rule.state_slots else None
        return _Made(0, True)

    def step_counters(self, steps_since_capture: int) -> dict[str, Any]:
        """Parameter name -> the `step` entry of its state after so many steps, if it has one."""
        templates: dict[int, Any] = {}
        rules, found = _update_of(self._graph).rules, {}
        group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self._updated():
            group = group_of.get(parameter)
            steps = self._starts.get(name, 0) + steps_since_capture
            if group is None or steps < 0 or not rules[name].counts_steps:
                continue
            if id(group) not in templates:
                owner = owner_of(self.optimizer, group)
                templates[id(group)] = _step_counter(owner, group)
            template = templates[id(group)]
            if isinstance(template, torch.Tensor):
                found[name] = torch.full_like(template, steps)
            elif template is not None:
                found[name] = steps
        return found

    def _write_step_counts(self, steps_since_capture: int) -> None:
        named = self.named_tensors()
        for name, counter in self.step_counters(steps_since_capture).items():
            if int(counter) <= 0:
                continue
            state = self.optimizer.state[named[name]]
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(int(counter))
            else:
                state["step"] = counter

    def _value(self, binding: Binding, tensors: dict[str, Any]) -> Any:
        if binding.kind == "constant":
            return binding.value
        if binding.key not in tensors:
            raise PlanMismatchError(
                f"The model must have what the captured one had: {binding.kind} {binding.key!r} "
                "is missing. Capture this model again."
            )
        owner = tensors[binding.key]
        if binding.kind != "state":
            return owner
        state = {} if self.optimizer is None else self.optimizer.state.get(owner, {})
        value = state.get(binding.slot)
        return self._fresh(binding, owner) if value is None else value

    def _check(self, binding: Binding, value: Any) -> None:
        tensor = self._graph.tensors[self._graph.ops[binding.op].outputs[0]]
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        if (shape, dtype) != (tensor.shape, tensor.dtype):
            slot = f" {binding.slot!r} of" if binding.kind == "state" else ""
            raise PlanMismatchError(
                f"The model must have what the captured one had: {binding.kind}{slot} "
                f"{binding.key!r} has shape {list(shape)} and dtype {dtype}, expected "
                f"{list(tensor.shape)} and {tensor.dtype}. Capture this model again."
            )

    def _fresh(self, binding: Binding, parameter: Any) -> Any:
        update = _update_of(self._graph)
        rule = None if update is None else update.rules.get(binding.key)
        tensor = self._graph.tensors[self._graph.ops[binding.op].outputs[0]]
        value = 0.0 if rule is None else rule.fresh_of(str(binding.slot), parameter).value
        return torch.full(tensor.shape, value, dtype=getattr(torch, tensor.dtype), device="cpu")

    def _real(self, binding: Binding, value: Any) -> Any:
        if not value.is_meta:
            return value
        if self._invent_seed is None:
            raise InputError(
                f"To run, the model needs values: {binding.kind} {binding.key!r} is on the meta "
                "device. Load weights (for example model.to_empty(device='cpu') and "
                "load_state_dict) first, or only plan."
            )
        return invent(value, binding.kind, self._invent_seed + binding.op)


def invent(tensor: Any, kind: str, seed: int) -> Any:
    """Made-up values for a tensor without any, good for checking numbers and nothing else.

    Matrices get variance 1 / fan-in, vectors and buffers values around 1 (so that variances are
    positive), integers and optimizer state 0.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if not tensor.is_floating_point() or kind == "state":
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    values = torch.rand(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
    if tensor.dim() >= 2 and kind == "parameter":
        fan_in = tensor[0].numel()
        values = (values - 0.5) * (12 / max(1, fan_in)) ** 0.5
    else:
        values = values + 0.5
    return values.to(tensor.dtype)


def _update_of(graph: Captured) -> Any:
    """The captured optimizer, None if the step has none."""
    return getattr(graph.program.scalars, "__self__", None)


def steps_at_capture(graph: Captured) -> dict[str, int]:
    """Parameter name -> steps its optimizer had made when the graph was captured."""
    update = _update_of(graph)
    return {name: rule.start for name, rule in update.rules.items()} if update else {}


def _put_state(state: Any, slot: str, value: Any, parameter: Any) -> None:
    present = state.get(slot)
    if isinstance(present, torch.Tensor) and present.shape == value.shape:
        present.copy_(value)
    else:
        state[slot] = value.detach().to(parameter.device, copy=True)


def _on_host_of(target: Any, value: Any) -> Any:
    """The value, brought to the host if its target is there: that can fail, writing then not."""
    return value.cpu() if is_host(target.device.type) else value


def _step_counter(optimizer: Any, group: dict[str, Any]) -> Any:
    """The `step` entry this optimizer makes for parameters of a group, or None if it has none.

    torch's optimizers create their state in the first step and each in its own way, so one of the
    same class makes a step on a scrap parameter.
    """
    place = group["params"][0].device  # a counter may be asked for where the parameter is
    scrap = torch.nn.Parameter(torch.zeros(1, device=place))
    scrap.grad = torch.zeros_like(scrap)
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    settings["differentiable"] = False  # no leaf can make such a step
    settings["capturable"] = settings.get("capturable", False) and not is_host(place.type)
    try:
        twin = type(optimizer)([{**settings, "params": [scrap]}])
        with torch.enable_grad(), torch.device("cpu"):  # whatever the user's default device is
            twin.step()
    except TypeError:  # a class of the user's with another constructor
        return None
    return twin.state[scrap].get("step")
