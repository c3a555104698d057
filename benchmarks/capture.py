"""CPU time of capture per node, for GPT-like and NMT-like stacks of growing size.

Run: `OMP_NUM_THREADS=1 python benchmarks/capture.py [--profile | --models | --micro-batches]`.
Time grows linearly; the bound is 1.5 ms of CPU per node on one core. With `--models` workloads and,
where installed, models of Transformers at small size, with AdamW; the last lines are medians. With
`--micro-batches` full workloads on the meta device as one batch and in 2, 4, 8, 16 micro-batches,
in turn, as a plan captures them: what one capture finds out, the next knows.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from devplace.step_capture import capture
from devplace.step_capture.micro_batches.chunks import Known
from devplace.workloads import build

VOCABULARY = 1000
MAX_MS_PER_NODE = 1.5
MODELS = (
    *("LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "MixtralForCausalLM"),
    *("T5ForConditionalGeneration", "ViTForImageClassification", "SwinForImageClassification"),
    *("MambaForCausalLM", "Gemma3ForCausalLM", "Wav2Vec2ForSequenceClassification"),
    *("DeepseekV3ForCausalLM", "ConvNextForImageClassification"),
)
WORKLOADS = (
    *("inception-v3", "resnet-50", "rnnlm", "nmt-4", "gnmt-4"),
    *("bert-base", "gpt-2", "llama", "vit-b-16", "moe"),
)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, rows, 3, self.heads, -1).unbind(2)
        query, key, value = (t.transpose(1, 2) for t in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, rows, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Embedding, blocks, tied head."""

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Nmt(nn.Module):
    """Unrolled LSTM encoder and decoder with attention in every decoder step."""

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def _unroll(self, cells: nn.ModuleList, inputs: Any, attend: Callable[..., Any]) -> list[Any]:
        states: list[Any] = [None] * len(cells)
        outputs = []
        for x in inputs.unbind(1):
            for i, cell in enumerate(cells):
                states[i] = cell(x, states[i])
                x = states[i][0]
            outputs.append(attend(x))
        return outputs

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.embedding(tokens)
        memory = torch.stack(self._unroll(self.encoder, inputs, lambda x: x), 1)

        def attend(x: torch.Tensor) -> torch.Tensor:
            weights = torch.softmax(torch.einsum("bw,btw->bt", x, memory), -1)
            context = torch.einsum("bt,btw->bw", weights, memory)
            return torch.tanh(self.mix(torch.cat([x, context], -1)))

        return self.head(torch.stack(self._unroll(self.decoder, inputs, attend), 1))


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Language-model loss of the tokens themselves."""
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def measure(
    label: str, model: nn.Module, inputs: Any, loss_fn: Any, optimizer: str = "AdamW"
) -> float:
    """Capture once; print nodes and CPU seconds, and give milliseconds per node."""
    trained = [p for p in model.parameters() if p.requires_grad]
    made = getattr(torch.optim, optimizer)(trained, lr=0.1)
    start = time.process_time()
    graph = capture(model, inputs, loss_fn, made)
    seconds = time.process_time() - start
    nodes = len(graph.ops)
    per_node = 1000 * seconds / nodes
    verdict = "" if per_node <= MAX_MS_PER_NODE else f"  over {MAX_MS_PER_NODE} ms"
    size = f"{label:34s} {optimizer:5s} {nodes:6d} nodes"
    print(f"{size} {seconds:7.2f} s {per_node:5.2f} ms/node{verdict}")
    return per_node


def stack(label: str, model: nn.Module, length: int, optimizer: str) -> None:
    """Measure one of the stacks here."""
    tokens = torch.zeros(4, length, dtype=torch.int64, device="meta")
    measure(label, model, tokens, loss, optimizer)


def models() -> None:
    """Workloads and models of Transformers at small size."""
    built = [(name, build(name, size="small")) for name in WORKLOADS]
    found = {"workloads": [measure(n, w.model, w.inputs, w.loss_fn) for n, w in built]}
    if find_spec("transformers"):
        sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
        from zoo.hugging import cases

        made = [(name, cases()[name]()) for name in MODELS]
        found["Transformers"] = [measure(n, c.model, c.inputs, c.loss_fn) for n, c in made]
    for kind, times in found.items():
        print(f"median of {len(times)} {kind}: {statistics.median(times):.2f} ms/node")


def micro_batches() -> None:
    """Captures of one step that differ in the number of micro-batches only."""
    warnings.filterwarnings("ignore", message="micro_batches=")
    for name in ("llama", "bert-large"):
        work, known = build(name, batch=16), Known()
        adam = torch.optim.AdamW(work.model.parameters())
        for count in (1, 2, 4, 8, 16):
            start = time.process_time()
            graph = capture(work.model, work.inputs, work.loss_fn, adam, count, known=known)
            seconds = time.process_time() - start
            print(f"{name:10s} {count:2d} micro-batches {len(graph.ops):6d} nodes {seconds:7.2f} s")


def main() -> None:
    """Measure all sizes, or profile one."""
    torch.set_num_threads(1)
    if "--micro-batches" in sys.argv:
        micro_batches()
        return
    with torch.device("meta"):
        if "--profile" in sys.argv:
            profile = cProfile.Profile()
            profile.runcall(stack, "gpt-12", Gpt(12), 32, "SGD")
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
            return
        stack("warm-up", Gpt(1), 32, "SGD")
        if "--models" in sys.argv:
            with torch.device("cpu"):
                models()
            return
        for layers in (6, 12, 24, 48, 96):
            stack(f"gpt-{layers}", Gpt(layers), 32, "SGD")
        stack("gpt-48", Gpt(48), 32, "AdamW")
        for length in (5, 10, 20, 40, 60):
            stack(f"nmt-4 x {length}", Nmt(4), length, "SGD")


if __name__ == "__main__":
    main()
