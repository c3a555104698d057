"""Fine-tuning with Transformers: checkpointed blocks, padded labels, own loss, output as a tuple.

Run: `python examples/transformers_tuning.py`, with transformers installed. It uses two logical CPU
devices; leave `machine` out to use the GPUs of the computer.
"""

import copy

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import devplace as dp

WORDS, PAD, NONE = 60, 0, -100  # labels of -100 are left out of the loss

config = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=32,
    pad_token_id=PAD,
    use_cache=False,
)


def loss_fn(model, input_ids, attention_mask, labels):
    """Smoothed cross entropy of the next word, over all that is no padding."""
    logits, *_ = model(input_ids, attention_mask, return_dict=False)
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, ignore_index=NONE, label_smoothing=0.1)


def batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Texts of these lengths, padded at the end."""
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    words = torch.randint(1, WORDS, mask.shape) * mask
    return {"input_ids": words, "attention_mask": mask, "labels": words.where(mask > 0, NONE)}


torch.manual_seed(0)
model = LlamaForCausalLM(config).double()
model.gradient_checkpointing_enable()  # the step computes each layer again in the backward pass
twin = copy.deepcopy(model)
data = [batch([12, 9, 5, 12]), batch([3, 12, 12, 7]), batch([8, 8, 12, 4])]

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with dp.parallelize(model, data[0], loss_fn, optimizer, machine=2, budget="20s") as step:
    losses = [float(step(**each)) for each in data]

optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
for each, found in zip(data, losses, strict=True):  # the ordinary loop
    optimizer.zero_grad()
    loss = loss_fn(twin, **each)
    loss.backward()
    optimizer.step()
    assert abs(float(loss.detach()) - found) < 1e-9
print("losses as in the ordinary loop: True")
