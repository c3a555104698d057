"""A bench of made-up devices whose numbers are known."""

from __future__ import annotations

from collections.abc import Sequence

from devplace.errors import ExecutionError
from devplace.run.probe import DeviceReport, StepReport
from devplace.run.probe.channels import Pair

SIZES = (1024, 2**20, 2**24)
LATENCY_NS = 5_000
KEY = {"devices": "cuda:0=GPU-a cuda:1=GPU-b", "torch": "2", "devplace": "0"}


class FakeBench:
    """GPUs `cuda:0` ... with links of 5 us and 100 GB/s by kernel; the engine never helps.

    Args:
        num: Number of GPUs.
        wrong: Pairs whose data arrives wrong.
        wrong_together: Pairs whose data arrives wrong with both directions in use.
        silent: Pairs whose ping-pong never ends.
        shared: What two pairs must have in common to share: `out`, `in`, `both`, `bridge`.
    """

    switch_bytes = 2**30
    tells_sharing = True

    def __init__(
        self,
        num: int = 3,
        wrong: Sequence[Pair] = (),
        wrong_together: Sequence[Pair] = (),
        silent: Sequence[Pair] = (),
        shared: Sequence[str] = (),
    ) -> None:
        self.names = tuple(f"cuda:{k}" for k in range(num))
        host = [pair for name in self.names for pair in (("cpu:0", name), (name, "cpu:0"))]
        self.pairs = (*((a, b) for a in self.names for b in self.names if a != b), *host)
        self._wrong, self._wrong_together, self._silent = wrong, wrong_together, silent
        self._shared = shared
        self.measured: list[Pair] = []
        self.is_closed = False
        self.peers: dict[str, Sequence[str]] = {}

    def ways(self, pair: Pair) -> tuple[str, ...]:
        return ("copy",) if "cpu:0" in pair else ("kernel", "engine")

    def warm_up(self) -> None:
        pass

    def check(self, pairs: Sequence[Pair], way: str) -> list[str]:
        wrong = self._wrong if len(pairs) == 1 else self._wrong_together
        return ["returned wrong data" if pair in wrong else "" for pair in pairs]

    def hops(self, pair: Pair) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
        if pair in self._silent:
            raise ExecutionError("did not arrive within 0.5 s")
        self.measured.append(pair)
        times = tuple(LATENCY_NS + size // 100 for size in SIZES)
        return SIZES, {way: times for way in self.ways(pair)}

    def device(self, name: str, peers: Sequence[str]) -> DeviceReport:
        self.peers[name] = peers
        return DeviceReport(name=name, send_overhead_ns=700, receive_overhead_ns=900, fork_ns=400)

    def together_ns(self, pairs: Sequence[Pair]) -> Sequence[int]:
        return [10**6 * (2 if self._share(pairs) else 1)] * len(pairs)

    def _share(self, pairs: Sequence[Pair]) -> bool:
        if len(pairs) == 1:
            return False
        a, b = pairs
        is_gpu = "cpu:0" not in (*a, *b)
        found = {
            "out": a[0] == b[0] and is_gpu,
            "in": a[1] == b[1] and is_gpu,
            "both": a == b[::-1],
            "bridge": not set(a) & set(b) and is_gpu,
        }
        return any(found[word] for word in self._shared)

    def step(self) -> StepReport:
        return StepReport(step_gap_ns=9_000, least_step_ns=40_000)

    def close(self) -> None:
        self.is_closed = True
