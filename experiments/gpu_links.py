"""Time of a tensor from one GPU to the other and back, by kind of push and size.

Run: `python experiments/gpu_links.py --out FILE`. Needs two GPUs with peer access.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from typing import Any

import torch

from devplace.run.cuda.device import CudaDevice, Flags
from devplace.run.cuda.push import push_by_engine, push_by_kernel, wait

ROUNDS = 10
KINDS: dict[str, Any] = {
    "kernel16": lambda *a: push_by_kernel(*a, 16),
    "kernel32": lambda *a: push_by_kernel(*a, 32),
    "kernel64": lambda *a: push_by_kernel(*a, 64),
    "kernel128": lambda *a: push_by_kernel(*a, 128),
    "engine": push_by_engine,
}


def hop_us(push: Any, num_bytes: int) -> float:
    """Mean time of one hop in a ping-pong of ROUNDS rounds inside two graphs, us."""
    devices = [CudaDevice(k, f"cuda:{k}") for k in range(2)]
    flags, buffers = [], []
    for device in devices:
        with device.current():
            flags.append(Flags(list(range(ROUNDS)), device.torch_device))
            buffers.append(torch.zeros(num_bytes // 4, device=device.torch_device))
    (_ := torch.zeros(1, device="cuda:0").to("cuda:1")).to("cuda:0")
    for me in range(2):
        torch.cuda.synchronize(me)
    blocks = 1
    for me in range(2):  # compile
        with devices[me].current():
            blocks = push(buffers[me], buffers[1 - me], flags[1 - me].counter(0), flags[me].epoch)
            wait(flags[me], [1], 10**9)
    for me in range(2):
        torch.cuda.synchronize(me)
    for mine in flags:
        mine.reset()
        mine.set_blocks(dict.fromkeys(range(ROUNDS), blocks))
    graphs = []
    for me in range(2):
        torch.cuda.synchronize(me)
        graph = torch.cuda.CUDAGraph()
        with devices[me].current():
            graph.capture_begin(capture_error_mode="relaxed")
            flags[me].epoch.add_(1)
            for k in range(ROUNDS):
                if me == 1:
                    wait(flags[1], [k], 10**9)
                push(buffers[me], buffers[1 - me], flags[1 - me].counter(k), flags[me].epoch)
                if me == 0:
                    wait(flags[0], [k], 10**9)
            graph.capture_end()
        graphs.append(graph)
    times = [replay(devices, graphs) for _ in range(8)]
    errors = [int(mine.error) for mine in flags]
    assert errors == [0, 0], errors
    return min(times[2:]) / (2 * ROUNDS) * 1e3


def replay(devices: list[CudaDevice], graphs: list[Any]) -> float:
    """Launch both graphs, each from a thread; time on device 0, ms."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def launch(me: int) -> None:
        with devices[me].current():
            if me == 0:
                events[0].record(devices[0].main)
            graphs[me].replay()
            if me == 0:
                events[1].record(devices[0].main)

    threads = [threading.Thread(target=launch, args=(me,)) for me in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in devices:
        device.synchronize()
    return float(events[0].elapsed_time(events[1]))


def main() -> None:
    """Measure all kinds and sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu_links.json")
    out = Path(parser.parse_args().out)
    rows = []
    for exponent in range(10, 29, 2):
        row: dict[str, Any] = {"bytes": 2**exponent}
        for name, push in KINDS.items():
            row[name] = round(hop_us(push, 2**exponent), 2)
        rows.append(row)
        print(row, flush=True)
        out.write_text(json.dumps({"card": torch.cuda.get_device_name(0), "hop_us": rows}))


if __name__ == "__main__":
    main()
