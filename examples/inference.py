"""An inference service: one placed step, called for every request.

Run: `python examples/inference.py`. It uses two logical CPU devices; leave `machine` out to use the
GPUs of the computer.
"""

import torch

import devplace as dp

SLOTS = 8  # requests that are answered together; the step has this batch size

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
example = torch.randn(SLOTS, 10, 32)

step = dp.parallelize(model, example, machine=2, budget="10s")


def answer(requests: list[torch.Tensor]) -> list[torch.Tensor]:
    """Answers to up to SLOTS requests; what is missing is filled up, and dropped again."""
    batch = torch.zeros(SLOTS, *example.shape[1:])
    batch[: len(requests)] = torch.stack(requests)
    return list(step(batch)[: len(requests)])


requests = [torch.randn(10, 32) for _ in range(3)]
with torch.no_grad():
    expected = model(torch.stack(requests))
found = torch.stack(answer(requests))
print("answers as of the model:", torch.allclose(found, expected, atol=1e-5))
step.close()
