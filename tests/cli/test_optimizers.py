"""Optimizers as texts on the command line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from devplace.cli.optimizers import CLASSES, make_optimizer, parse_optimizer
from devplace.errors import InputError
from devplace.step_capture.optimizers.traced import KINDS


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("sgd", "sgd", {"lr": 0.01}),
        ("sgd:momentum=0.9", "sgd", {"lr": 0.01, "momentum": 0.9}),
        ("adamw:lr=1e-3,betas=(0.9,0.95)", "adamw", {"lr": 1e-3, "betas": (0.9, 0.95)}),
        ("adam:amsgrad=True", "adam", {"amsgrad": True}),
        ("rmsprop:", "rmsprop", {}),
    ],
)
def test_options_are_plain_values_with_names(text: str, name: str, options: Any) -> None:
    """Those of Python: numbers, truth values, tuples. Only SGD has another default than torch's."""
    assert parse_optimizer(text) == (name, options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("adanw", "Did you mean 'adamw'"),
        ("adamw:lr", "must look like adamw:lr=1e-3"),
        ("adamw:0.1", "must look like"),
        ("sgd:lr=print(3)", "must look like"),
        ("sgd:**{'lr':1}", "must look like"),
        ("sgd:lr=1)+_(lr=2", "must look like"),
        ("sgd:lr=" + "(" * 500, "must look like"),
        ("sgd:lr=1e999", "lr must be finite, got inf"),
        ("adam:betas=(0.9,-1e999)", "betas must be finite"),
    ],
)
def test_other_texts_are_refused(text: str, words: str) -> None:
    """Nothing in them is run."""
    with pytest.raises(InputError, match=words):
        parse_optimizer(text)


def test_torch_makes_it_or_says_why_not() -> None:
    """Its own checks of options hold."""
    weight = [torch.nn.Parameter(torch.ones(2))]
    made = make_optimizer("adamw:lr=0.5,weight_decay=0.25", weight)
    assert type(made) is torch.optim.AdamW
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (0.5, 0.25)
    for text in ("adam:lr=-1.0", "adam:betas=()", "adam:betas=(0.9,)"):
        words = rf"torch\.optim\.Adam does not take.*{re.escape(text)}"
        with pytest.raises(InputError, match=words):
            make_optimizer(text, weight)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("adam:amsgrad='yes'", "amsgrad must be True or False, got 'yes'. torch's own value is F"),
        ("sgd:nesterov=1", "nesterov must be True or False, got 1"),
        ("sgd:lr=True", "lr must be a number, got True"),
        ("adam:foreach='no'", "foreach must be no text, got 'no'"),
    ],
)
def test_options_of_another_kind_are_refused(text: str, words: str) -> None:
    """torch itself would take any text for true, and True for 1."""
    with pytest.raises(InputError, match=re.escape(words)):
        make_optimizer(text, [torch.nn.Parameter(torch.ones(2))])


def test_an_option_that_is_a_text_may_be_one() -> None:
    """Muon has one."""
    weight = [torch.nn.Parameter(torch.ones(2, 2))]
    made = make_optimizer("muon:adjust_lr_fn='match_rms_adamw'", weight)
    assert made.defaults["adjust_lr_fn"] == "match_rms_adamw"


def test_all_that_capture_takes_can_be_named() -> None:
    """The rules by hand, and those that are traced from torch's code."""
    assert {name.lower() for name in CLASSES} >= {"sgd", "adam", "adamw", *KINDS}
