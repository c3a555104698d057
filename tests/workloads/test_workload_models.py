"""The models compute what they claim to: shapes, masks, causality, attention, routing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from devplace import workloads
from devplace.workloads.bert import IGNORED
from devplace.workloads.llama import NORM_EPS, RmsNorm, rotary_angles, rotated
from devplace.workloads.moe import ExpertLayer, MoeConfig
from devplace.workloads.nmt import AdditiveAttention


def small(name: str, **settings: object) -> workloads.Workload:
    """The small size on the CPU, without dropout."""
    if name == "llama":  # has none
        return workloads.build(name, "small", device="cpu", **settings)
    return workloads.build(name, "small", device="cpu", dropout=0.0, **settings)


@pytest.mark.parametrize("name", ["gpt-2", "llama", "rnnlm"])
def test_language_models_do_not_see_the_future(name: str) -> None:
    """Another last token changes the logits of the last position only."""
    workload = small(name)
    tokens = workload.inputs[0]
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    before, after = workload.model(tokens), workload.model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


@pytest.mark.parametrize("name", ["nmt-2", "nmt-4", "nmt-8", "gnmt-4"])
def test_translation_reads_all_of_the_source_and_only_past_targets(name: str) -> None:
    """The first logits depend on the last source word, not on the second target word."""
    workload = small(name)
    source, target, _ = workload.inputs
    logits = workload.model(source, target)
    later = target.clone()
    later[:, 1:] = (later[:, 1:] + 1) % 50
    assert torch.equal(workload.model(source, later)[:, 0], logits[:, 0])
    other = source.clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    assert not torch.equal(workload.model(other, target)[:, 0], logits[:, 0])


@pytest.mark.parametrize(
    ("name", "calls"), [("rnnlm", 2 * 6), ("nmt-2", 4 * 4), ("nmt-8", 16 * 4), ("gnmt-4", 9 * 4)]
)
def test_cells_are_called_once_per_layer_and_step(name: str, calls: int) -> None:
    """Recurrent models are unrolled: layers x steps cell calls, one embedding call a side."""
    workload = small(name)
    counts = {nn.LSTMCell: 0, nn.Embedding: 0}
    for module in workload.model.modules():
        if type(module) in counts:
            module.register_forward_hook(_counter(counts))
    workload.loss_fn(workload.model, *workload.inputs)
    assert counts[nn.LSTMCell] == calls
    assert counts[nn.Embedding] == (1 if name == "rnnlm" else 2)


def _counter(counts: dict[type, int]) -> Callable[..., None]:
    def count(module: nn.Module, *_: object) -> None:
        counts[type(module)] += 1

    return count


def test_attention_is_the_softmax_weighted_mean() -> None:
    """With zero scores the context is the plain mean of the memory."""
    attention = AdditiveAttention(3)
    nn.init.zeros_(attention.score.weight)
    memory = torch.arange(12.0).reshape(1, 4, 3)
    context = attention(torch.ones(1, 3), memory, attention.key(memory))
    torch.testing.assert_close(context, memory.mean(1))


def test_bert_padding_does_not_reach_other_tokens() -> None:
    """Another token under the padding leaves every other position's logits as they are."""
    workload = small("bert-base")
    tokens, mask, segments, _ = workload.inputs
    assert mask[1].tolist() == [1, 1, 1, 1, 1, 0]
    changed = tokens.clone()
    changed[mask == 0] = (changed[mask == 0] + 1) % 50
    before = workload.model(tokens, mask, segments)
    after = workload.model(changed, mask, segments)
    assert torch.equal(before[mask == 1], after[mask == 1])


@pytest.mark.parametrize("seq", [1, 2, 3, 6, 8])
def test_bert_rows_have_equally_many_labels_off_the_padding(seq: int) -> None:
    """Every row has the same number of labels, so micro-batch means average to the batch mean."""
    tokens, mask, segments, labels = small("bert-base", seq=seq, batch=8).inputs
    is_label = labels != IGNORED
    assert len(set(is_label.sum(1).tolist())) == 1
    assert is_label.any()
    assert mask[is_label].all()
    assert torch.equal(labels[is_label], tokens[is_label])
    assert set(segments.unique().tolist()) <= {0, 1}


@pytest.mark.parametrize("name", ["bert-base", "gpt-2", "vit-b-16", "moe"])
def test_fused_attention_gives_the_same_loss(name: str) -> None:
    """One attention operation or its parts: the same loss to float64 rounding."""
    losses = []
    for fused in (True, False):
        workload = small(name, fused_attention=fused)
        inputs = [x.double() if x.is_floating_point() else x for x in workload.inputs]
        losses.append(workload.loss_fn(workload.model.double(), *inputs))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)


def test_text_targets_are_the_next_tokens() -> None:
    """Language-model targets are the inputs one step later."""
    for name in ("gpt-2", "llama", "rnnlm", "moe"):
        tokens, targets = small(name).inputs
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_expert_layer_sums_weighted_experts() -> None:
    """With room for every token, each one gets its two experts' outputs times their chances."""
    torch.manual_seed(0)
    config = MoeConfig(width=4, feed_forward=8, experts=3, capacity=3.0)
    layer = ExpertLayer(config)
    x = torch.randn(5, 4)
    result, balance = layer(x)
    chances = torch.softmax(layer.gate(x), -1)
    values, chosen = chances.topk(2, -1)
    for token in range(5):
        pairs = zip(values[token], chosen[token].tolist(), strict=True)
        expected = sum(value * layer.experts[index](x[token]) for value, index in pairs)
        torch.testing.assert_close(result[token], expected)
    assert balance > 0


def test_expert_layer_keeps_to_its_capacity() -> None:
    """An expert takes no more tokens than capacity times the even share."""
    config = MoeConfig(width=4, feed_forward=8, experts=4, capacity=1.0)
    layer = ExpertLayer(config)
    seen: list[int] = []
    for expert in layer.experts:
        expert.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0]))
    layer(torch.randn(8, 4))
    assert seen == [4, 4, 4, 4]


def test_inception_loss_weighs_the_auxiliary_head() -> None:
    """The loss is the main cross entropy plus 0.4 times the auxiliary one."""
    workload = small("inception-v3")
    images, labels = workload.inputs
    main, auxiliary = workload.model(images)
    assert main.shape == auxiliary.shape == (4, 10)
    expected = nn.functional.cross_entropy(main, labels)
    expected = expected + 0.4 * nn.functional.cross_entropy(auxiliary, labels)
    torch.testing.assert_close(workload.loss_fn(workload.model, images, labels), expected)


@pytest.mark.parametrize(("name", "convolutions"), [("resnet-50", 53), ("resnet-152", 155)])
def test_resnet_has_its_layers(name: str, convolutions: int) -> None:
    """One stem, three convolutions a block, four shortcuts: with the classifier the named depth."""
    model = workloads.build(name).model
    count = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert count == convolutions
    assert count - 4 + 1 == int(name.split("-")[1])


def test_rotation_keeps_lengths_and_only_differences_of_positions_count() -> None:
    """Turned by their positions, two vectors have their lengths, and a product that depends on how
    far apart they are."""
    torch.manual_seed(0)
    cos, sin = (each.double() for each in rotary_angles(16, 8))
    query, key = torch.randn(2, 8, dtype=torch.float64)
    queries = rotated(query.expand(16, 8), cos, sin)
    keys = rotated(key.expand(16, 8), cos, sin)
    torch.testing.assert_close(queries.norm(dim=1), query.norm().expand(16))
    products = queries @ keys.T
    torch.testing.assert_close(
        products[5:, 2:].diagonal(), products[3, 0].expand(11), rtol=1e-5, atol=1e-5
    )
    assert not torch.isclose(products[3, 0], products[4, 0])


def test_rms_norm_is_torchs() -> None:
    """The norm of Llama equals torch's own."""
    norm = RmsNorm(5)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 5)
    expected = nn.functional.rms_norm(x, (5,), norm.weight, NORM_EPS)
    torch.testing.assert_close(norm(x), expected)


def test_vit_reads_every_patch() -> None:
    """The logits depend on every patch of the image, each through its own token."""
    workload = small("vit-b-16")
    images = workload.inputs[0].requires_grad_()
    logits = workload.model(images)
    assert logits.shape == (4, 10)
    (gradient,) = torch.autograd.grad(logits.sum(), images)
    assert gradient.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum((1, 4, 5)).gt(0).all()
