"""An embedding that does not fit the GPU rests on the CPU, which works beside the GPU.

Covers: `limits`, `pins`, CPU and GPU in one plan, `dp.compile`.
Scenario: a ranking model with a large table and a small network. The GPU's limit has no room for
    the table with its gradient, so the plan keeps lookup and update of the table on cpu:0 and the
    network on cuda:0. Without a GPU the same plan runs on logical CPU devices.
"""

import argparse

import torch
from torch import nn

import devplace as dp

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=50_000)  # 12 GB of table: 24_000_000
parser.add_argument("--limit", default="20MB")  # of cuda:0; the table takes 256 bytes a row
args = parser.parse_args()


class Ranker(nn.Module):
    def __init__(self, rows: int, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.net = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.net(self.table(items).mean(dim=1)).squeeze(1)


torch.manual_seed(0)
device = "cuda:0" if torch.cuda.is_available() else "cpu"
model = Ranker(args.rows)
model.net.to(device)  # the table stays in main memory
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
items = torch.randint(args.rows, (128, 32), device=device)
wanted = torch.rand(128, device=device)

graph = dp.capture(model, (items, wanted), nn.functional.mse_loss, optimizer)
machine = dp.load_machine("detect" if device != "cpu" else "h100x4")
others = [name for name in machine.device_names if name not in ("cpu:0", "cuda:0")]
problem = dp.Problem(
    graph,
    machine,
    dp.Analytic()(graph, machine),
    limits={"cuda:0": args.limit},
    pins={"net": "cuda:0"},
    exclude=others,
)
result = dp.place(problem, dp.placers.Search(), budget="300ev", seed=0)
homes = {op.name: result.plan.placement[k] for k, op in enumerate(graph.ops) if op.is_source}
for name in ("table.weight", "net.0.weight"):
    print(name, "on", machine.device_names[homes[name]])

step = dp.compile(graph, result.plan)
losses = [float(step(items, wanted)) for _ in range(5)]
step.sync()
step.close()
print("loss falls:", losses[-1] < losses[0])
