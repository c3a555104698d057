"""Placers that read segments."""

from __future__ import annotations

import pytest
import torch

from devplace.research.policies import FORBIDDEN, log_prob
from devplace.research.segments import SegmentSeq2Seq, SegmentTransformer


def seq2seq(groups: int = 7, segment: int = 3) -> tuple[SegmentSeq2Seq, torch.Tensor]:
    """A small placer and embeddings."""
    torch.manual_seed(0)
    return SegmentSeq2Seq(5, 3, 8, segment, 5.0), torch.randn(groups, 5)


def test_what_is_drawn_is_what_is_scored() -> None:
    """Logits at drawing time equal those of the stored actions scored at once."""
    placer, groups = seq2seq()
    actions, drawn_from = placer.act(groups, 4, torch.Generator().manual_seed(0))
    assert actions.shape == (4, 7)
    assert torch.allclose(drawn_from, placer.logits(groups, actions), atol=1e-5)


def test_probabilities_of_all_placements_sum_to_one() -> None:
    """Over all 3^4 placements, with a segment that ends in the middle."""
    placer, groups = seq2seq(groups=4)
    every = torch.cartesian_prod(*[torch.arange(3)] * 4)
    total = log_prob(placer.logits(groups, every), every).sum(1).exp().sum()
    assert float(total.detach()) == pytest.approx(1.0, abs=1e-5)


def test_later_segments_do_not_change_earlier_choices() -> None:
    """The last segment's embeddings reach its own logits only; the first ones reach all."""
    placer, groups = seq2seq()
    actions = torch.zeros(1, 7, dtype=torch.int64)
    before = placer.logits(groups, actions)[0]
    late, early = groups.clone(), groups.clone()
    late[6] += 1
    early[0] += 1
    after = placer.logits(late, actions)[0]
    assert torch.equal(after[:6], before[:6])
    assert not torch.allclose(after[6], before[6])
    assert not torch.allclose(placer.logits(early, actions)[0, 6], before[6])


def test_one_segment_reads_everything() -> None:
    """With a segment as long as the sequence, the last embedding reaches the first choice."""
    placer, groups = seq2seq(segment=7)
    actions = torch.zeros(1, 7, dtype=torch.int64)
    other = groups.clone()
    other[6] += 1
    assert not torch.allclose(
        placer.logits(other, actions)[0, 0], placer.logits(groups, actions)[0, 0]
    )


def test_forbidden_devices_are_never_drawn() -> None:
    """A mask holds at every step, in both placers."""
    placer, groups = seq2seq()
    allowed = torch.ones(7, 3, dtype=torch.bool)
    allowed[2] = torch.tensor([False, True, False])
    actions, _ = placer.act(groups, 50, torch.Generator().manual_seed(0), allowed)
    assert (actions[:, 2] == 1).all()
    assert (placer.logits(groups, actions, allowed)[:, 2, 0] == FORBIDDEN).all()
    transformer = SegmentTransformer(5, 3, 8, 3, 5.0)
    assert (transformer(groups, allowed)[2, [0, 2]] == FORBIDDEN).all()


def test_attention_reaches_back_as_many_segments_as_layers() -> None:
    """Two layers: a group sees its segment and the two before it, and nothing later."""
    torch.manual_seed(0)
    transformer, groups = SegmentTransformer(5, 3, 8, 2, 5.0, layers=2), torch.randn(8, 5)
    before = transformer(groups)
    assert before.shape == (8, 3)
    changed = []
    for group in range(8):
        other = groups.clone()
        other[group] += 1
        changed.append(not torch.allclose(transformer(other)[6], before[6]))
    assert changed == [False, False, True, True, True, True, True, True]


def test_earlier_segments_carry_no_gradient() -> None:
    """Only the group's own segment is learned from."""
    transformer, groups = SegmentTransformer(5, 3, 8, 2, 5.0), torch.randn(6, 5).requires_grad_()
    transformer(groups)[5].sum().backward()
    assert groups.grad is not None
    assert (groups.grad.abs().sum(1) > 0).tolist() == [False] * 4 + [True] * 2
