"""Optimizers of torch.optim as functions of tensors.

SGD, Adam and AdamW are written here as their single-tensor path in torch.optim, except that all
that depends on the learning rate or on the step number enters as a 0-dim float64 tensor.
Of the others the path itself is traced (`own_step`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from devplace.errors import CaptureError
from devplace.step_capture.optimizers.several import each_of, kind_of
from devplace.step_capture.optimizers.traced import FORMS, KINDS, Fresh, fresh_state, own_step
from devplace.step_capture.optimizers.wide import LOW_PRECISION, Exact, by_casts, in_pieces

Scalars = Mapping[str, torch.Tensor]
Updated = tuple[torch.Tensor, dict[str, torch.Tensor]]
_FIXED_OPTIONS = {
    "sgd": ("dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
}
_REFUSED = {
    torch.optim.LBFGS: "it computes the loss several times in a step",
    torch.optim.SparseAdam: "it takes sparse gradients alone",
}


@dataclass(frozen=True)
class UpdateRule:
    """How the parameters of one group are updated, from one starting step count.

    Attributes:
        kind: `sgd`, `adam`, or one of `own_step.KINDS`.
        group: Index among the optimizer's param_groups.
        start: Steps already taken when the step was captured.
        options: Hyper-parameters at capture.
        cohort: Which of the group's starting step counts this is, 0 for the smallest. Names carry
            it instead of the count, so that a resumed step is the same graph.
        fresh: Of a traced rule, the state before the first step, by name.
    """

    kind: str
    group: int
    start: int
    options: Mapping[str, Any]
    cohort: int = 0
    fresh: Mapping[str, Fresh] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Start of the names of its scalars."""
        return f"group{self.group}" + (f"@{self.cohort}" if self.cohort else "")

    @property
    def state_slots(self) -> tuple[str, ...]:
        """Names in `optimizer.state[p]` of the tensors it keeps."""
        if self.kind in KINDS:
            return tuple(name for name in self.fresh if name != "step")
        if self.kind == "sgd":
            return ("momentum_buffer",) if self.options["momentum"] != 0 else ()
        extra = ("max_exp_avg_sq",) if self.options["amsgrad"] else ()
        return ("exp_avg", "exp_avg_sq", *extra)

    @property
    def counts_steps(self) -> bool:
        """Whether its state has the number of steps made."""
        return self.kind == "adam" or "step" in self.fresh

    def fresh_of(self, slot: str, param: torch.Tensor) -> Fresh:
        """A tensor of the state before the first step."""
        return self.fresh.get(slot, Fresh(tuple(param.shape), param.dtype, 0.0))

    def scalars(self, step: int, options: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Value of each scalar at the 1-based `step` after capture, as torch.optim computes it.

        Raises:
            CaptureError: An option that is fixed in the graph has changed.
        """
        options = self.options if options is None else options
        self._check_fixed(options)
        lr = float(options["lr"])
        if self.kind in KINDS:
            named = {"lr": lr, "step": float(self.start + step - 1)}
            return {f"{self.prefix}.{name}": value for name, value in named.items()}
        values = _sgd_scalars if self.kind == "sgd" else _adam_scalars
        named = values(lr, self.start + step, options)
        return {f"{self.prefix}.{name}": value for name, value in named.items()}

    def _check_fixed(self, options: Mapping[str, Any]) -> None:
        fixed = _FIXED_OPTIONS.get(self.kind) or [n for n in self.options if n != "lr"]
        for name in fixed:
            if name in options and _plain(options[name]) != self.options[name]:
                way = " (for schedulers: cycle_momentum=False)" if name == "betas" else ""
                raise CaptureError(
                    f"Only the learning rate and SGD's momentum may change after capture: {name!r} "
                    f"of parameter group {self.group} is {options[name]!r}, captured with "
                    f"{self.options[name]!r}. Capture again, or keep it fixed{way}."
                )
        if self.kind == "sgd" and (options["momentum"] != 0) != (self.options["momentum"] != 0):
            raise CaptureError(
                f"Momentum cannot be switched on or off after capture: group {self.group} has "
                f"{options['momentum']!r}, captured with {self.options['momentum']!r}. "
                f"Capture again."
            )

    def apply(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        scalars: Scalars,
        is_fused: bool = False,
    ) -> Updated:
        """New parameter and new state; of 16 bits by casts if a compiler will fuse them away."""
        exact = by_casts if is_fused else in_pieces
        named = {k.rpartition(".")[2]: v for k, v in scalars.items() if self._owns(k)}
        if self.kind in KINDS:
            return own_step(self.kind, self.options, param, grad, state, named, exact)
        if self.options["maximize"]:
            grad = torch.neg(grad)
        update = _sgd if self.kind == "sgd" else _adam
        return update(param, grad, state, named, self.options, exact)

    def _owns(self, scalar: str) -> bool:
        return scalar.rpartition(".")[0] == self.prefix


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(None if v is None else float(v) for v in value)
    return float(value) if isinstance(value, torch.Tensor) else value


def _sgd_scalars(lr: float, step: int, options: Mapping[str, Any]) -> dict[str, float]:
    values = {"neg_lr": -lr}
    if options["momentum"] != 0:
        values["momentum"] = float(options["momentum"])
        if options["dampening"] != 0:
            values["grad_factor"] = 1.0 if step == 1 else 1.0 - float(options["dampening"])
    return values


def _adam_scalars(lr: float, step: int, options: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = (float(b) for b in options["betas"])
    values = {
        "neg_step_size": -(lr / (1 - beta1**step)),
        "bias_correction2_sqrt": (1 - beta2**step) ** 0.5,
    }
    if options["decoupled_weight_decay"] and options["weight_decay"] != 0:
        values["decay"] = 1 - lr * float(options["weight_decay"])
    return values


def _sgd(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    scalars: Scalars,
    options: Mapping[str, Any],
    exact: Exact,
) -> Updated:
    new_state = {}
    if options["weight_decay"] != 0:
        grad = torch.add(grad, param, alpha=options["weight_decay"])
    if options["momentum"] != 0:
        added = grad
        if "grad_factor" in scalars:
            added = exact("mul", grad, scalars["grad_factor"])
        # Of 16 bits as torch has it, which rounds the product before it adds.
        form = "scaled_add" if added.dtype in LOW_PRECISION else "addcmul"
        buffer = exact(form, added, state["momentum_buffer"], scalars["momentum"])
        new_state["momentum_buffer"] = buffer
        if options["nesterov"]:
            grad = exact("addcmul", grad, buffer, scalars["momentum"])
        else:
            grad = buffer
    return exact("addcmul", param, grad, scalars["neg_lr"]), new_state


def _adam(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    scalars: Scalars,
    options: Mapping[str, Any],
    exact: Exact,
) -> Updated:
    beta1, beta2 = (float(b) for b in options["betas"])
    if options["weight_decay"] != 0:
        if options["decoupled_weight_decay"]:
            param = exact("mul", param, scalars["decay"])
        else:
            grad = torch.add(grad, param, alpha=options["weight_decay"])
    mean = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    square = torch.addcmul(state["exp_avg_sq"] * beta2, grad, grad, value=1 - beta2)
    new_state = {"exp_avg": mean, "exp_avg_sq": square}
    largest = square
    if options["amsgrad"]:
        largest = torch.maximum(state["max_exp_avg_sq"], square)
        new_state["max_exp_avg_sq"] = largest
    root = exact("div", largest.sqrt(), scalars["bias_correction2_sqrt"])
    denominator = root + options["eps"]

    return exact("addcdiv", param, mean, denominator, scalars["neg_step_size"]), new_state


@dataclass(frozen=True)
class Update:
    """The whole optimizer: a rule for each parameter it trains.

    Attributes:
        kind: Name of the class; of several optimizers all, such as `Muon+AdamW`.
        rules: Parameter name -> rule.
        num_groups: Parameter groups of the optimizer.
    """

    kind: str
    rules: Mapping[str, UpdateRule]
    num_groups: int

    def scalar_names(self, parameters: Sequence[str]) -> list[str]:
        """Names of the scalars the update of these parameters needs, in a fixed order."""
        names: dict[str, None] = {}
        for parameter in parameters:
            names |= dict.fromkeys(self.rules[parameter].scalars(1))
        return list(names)

    def scalars(
        self, step: int, param_groups: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, float]:
        """Value of every scalar at the 1-based step after capture.

        Args:
            step: Number of the step, 1 for the first one after capture.
            param_groups: The optimizer's present groups (a scheduler may have changed them);
                those at capture by default.

        Raises:
            CaptureError: Another number of groups, or a changed option that is fixed in the graph.
        """
        values: dict[str, float] = {}
        if param_groups is not None and len(param_groups) != self.num_groups:
            raise CaptureError(
                f"The optimizer must keep its parameter groups: captured {self.num_groups}, now "
                f"{len(param_groups)}. Capture again."
            )
        for rule in {(r.group, r.start): r for r in self.rules.values()}.values():
            options = None if param_groups is None else param_groups[rule.group]
            values.update(rule.scalars(step, options))
        return values


def make_update(
    optimizer: Any, parameters: Mapping[str, torch.Tensor], aliases: Mapping[int, str]
) -> Update:
    """Read an optimizer of torch; it is left as it is.

    Args:
        optimizer: One of torch.optim, or several as `Optimizers`.
        parameters: The model's parameters by name.
        aliases: Name of each parameter by `id`.

    Raises:
        CaptureError: Another optimizer, or one over tensors which are not the model's parameters.
    """
    rules: dict[str, UpdateRule] = {}
    known: dict[Any, dict[str, Fresh]] = {}
    groups = [(one, group) for one in each_of(optimizer) for group in _kind_and_groups(one)[1]]
    for index, (one, group) in enumerate(groups):
        kind, _ = _kind_and_groups(one)
        options = _options(kind, one, group)
        for param in group["params"]:
            name = aliases.get(id(param))
            if name is None or name not in parameters:
                raise CaptureError(
                    f"The optimizer must train parameters of the model: a parameter of shape "
                    f"{tuple(param.shape)} in group {index} is not in it. Build the optimizer from "
                    f"this model's parameters (after wrapping or moving it); to train a criterion "
                    f"too, capture one module that holds model and criterion."
                )
            _refuse_parameter(name, param)
            if name in rules:
                raise CaptureError(
                    f"A parameter must be trained by one optimizer: {name!r} is in several groups. "
                    f"Take it out of all but one."
                )
            start = _steps_taken(one.state.get(param, {}))
            alike = index, tuple(param.shape), param.dtype
            if kind in KINDS and alike not in known:
                known[alike] = fresh_state(kind, options, param)
            rules[name] = UpdateRule(kind, index, start, options, fresh=known.get(alike, {}))
    return Update(kind_of(optimizer), _with_cohorts(rules), len(groups))


def _refuse_parameter(name: str, param: torch.Tensor) -> None:
    """Refuse what cannot be trained: complex numbers, and tensors of inference mode."""
    if param.is_complex():
        raise CaptureError(
            f"Trained parameters must be real: {name!r} is {_dtype(param)}. Keep it as a "
            f"real one (torch.view_as_real) and use torch.view_as_complex of it in forward, or "
            f"freeze it."
        )
    if param.is_inference():
        raise CaptureError(
            f"Parameters made under torch.inference_mode cannot be trained: {name!r} is "
            f"one. Make the model outside of it."
        )


def _kind_and_groups(optimizer: Any) -> tuple[str, list[dict[str, Any]]]:
    """Name of an optimizer's rule, and its parameter groups.

    Raises:
        CaptureError: It is none that can be captured.
    """
    kinds = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}
    kinds |= {known: kind for kind, known in KINDS.items()}
    kind = kinds.get(type(optimizer))
    if kind is not None:
        return kind, optimizer.param_groups
    is_made = not isinstance(optimizer, (str, type))
    got = type(optimizer).__name__ if is_made else optimizer
    known = ", ".join(sorted(each.__name__ for each in kinds))
    reason = _REFUSED.get(type(optimizer), "it is no class of torch.optim, whose update is known")
    raise CaptureError(
        f"The optimizer must be an instance of one of torch.optim's that take dense gradients "
        f"({known}), got {got!r}{f': {reason}' if is_made else ''}. Build one of these over "
        f"model.parameters(), or capture without an optimizer."
    )


def _options(kind: str, optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group; it may hold others of the user's."""
    if kind in KINDS:
        known = [name for name in optimizer.defaults if name not in FORMS]
    else:
        known = ["lr", "momentum", *_FIXED_OPTIONS[kind]]
    options = {k: _plain(v) for k, v in group.items() if k in known}
    if kind == "adam":
        options.setdefault("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    return options


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _with_cohorts(rules: Mapping[str, UpdateRule]) -> dict[str, UpdateRule]:
    starts: dict[int, set[int]] = {}
    for rule in rules.values():
        starts.setdefault(rule.group, set()).add(rule.start)
    return {
        name: replace(rule, cohort=sorted(starts[rule.group]).index(rule.start))
        for name, rule in rules.items()
    }


def _steps_taken(state: Mapping[str, Any]) -> int:
    if "step" in state:
        return int(state["step"])
    return 1 if state.get("momentum_buffer") is not None else 0
