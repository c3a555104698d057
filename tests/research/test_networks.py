"""Networks of learned placers."""

from __future__ import annotations

import pytest
import torch

from devplace.research.gcn import Gcn, normalised_edges
from devplace.research.mlp import Mlp
from devplace.research.policies import FORBIDDEN, log_prob
from devplace.research.seq2seq import Seq2Seq


def seq2seq(groups: int = 7, actions: int = 3) -> tuple[Seq2Seq, torch.Tensor]:
    """A small policy and embeddings."""
    torch.manual_seed(0)
    return Seq2Seq(5, actions, hidden=8, temperature=1.0), torch.randn(1, groups, 5)


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_is_drawn_is_what_is_scored(is_shared: bool) -> None:
    """Logits at drawing time equal the logits of the stored actions scored at once."""
    policy, groups = seq2seq()
    if not is_shared:
        groups = torch.randn(4, 7, 5)
    actions, drawn_from = policy.act(groups, 4, torch.Generator().manual_seed(0))
    assert actions.shape == (4, 7)
    scored = policy.logits(groups, actions)
    assert torch.allclose(drawn_from, scored, atol=1e-5)
    assert scored.requires_grad
    assert not drawn_from.requires_grad


def test_probabilities_of_all_placements_sum_to_one() -> None:
    """Over all 3^4 placements, each choice given those before it."""
    policy, groups = seq2seq(groups=4)
    every = torch.cartesian_prod(*[torch.arange(3)] * 4)
    total = log_prob(policy.logits(groups, every), every).sum(1).exp().sum()
    assert float(total.detach()) == pytest.approx(1.0, abs=1e-5)


def test_choices_depend_on_those_before() -> None:
    """Another device for the first group changes the later logits, and not its own."""
    policy, groups = seq2seq()
    actions = torch.zeros(2, 7, dtype=torch.int64)
    actions[1, 0] = 1
    first, second = policy.logits(groups, actions)
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1])


def test_forbidden_devices_are_never_drawn() -> None:
    """A mask holds at every step."""
    policy, groups = seq2seq()
    allowed = torch.ones(7, 3, dtype=torch.bool)
    allowed[2] = torch.tensor([False, True, False])
    actions, logits = policy.act(groups, 50, torch.Generator().manual_seed(0), allowed)
    assert (actions[:, 2] == 1).all()
    assert (policy.logits(groups, actions, allowed)[:, 2, 0] == FORBIDDEN).all()
    assert logits[:, :2].abs().max() <= policy.tanh_constant


def test_graph_convolution_by_hand() -> None:
    """A path of three nodes with the identity as weights: sums over sqrt of degrees."""
    edges, weights = normalised_edges(torch.tensor([[0, 1], [1, 2]]), 3)
    layer = Gcn(1, 1)
    with torch.no_grad():
        layer.linear.weight.fill_(1.0)
    found = layer(torch.tensor([[1.0], [2.0], [4.0]]), edges, weights)[:, 0]
    root = 6**-0.5
    assert found.tolist() == pytest.approx([1 / 2 + 2 * root, 2 / 3 + 5 * root, 4 / 2 + 2 * root])


def test_graph_convolution_is_the_dense_formula() -> None:
    """`D^-1/2 (A + I) D^-1/2 X W + b` on a random graph; edges in both directions count once."""
    torch.manual_seed(0)
    pairs = torch.randint(0, 9, (2, 20))
    dense = torch.eye(9)
    for a, b in pairs.T.tolist():
        dense[a, b] = dense[b, a] = 1
    degree = dense.sum(1)
    dense = dense / (degree[:, None] * degree[None]).sqrt()
    layer, nodes = Gcn(4, 6), torch.randn(9, 4)
    both = torch.cat([pairs, pairs.flip(0)], 1)
    found = layer(nodes, *normalised_edges(both, 9))
    expected = dense @ nodes @ layer.linear.weight.T + layer.bias
    assert torch.allclose(found, expected, atol=1e-6)


def test_mlp_has_no_activation_at_its_end() -> None:
    """Outputs of a layer stack may be negative; hidden ones may not."""
    torch.manual_seed(0)
    outputs = Mlp([3, 8, 2])(torch.randn(100, 3))
    assert outputs.shape == (100, 2)
    assert outputs.min() < 0
