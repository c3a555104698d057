# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Triton kernels that carry a tensor into another GPU's memory and tell it so."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

BLOCK = 2048
WARPS = 8


def _push(src, dst, flag, count, rounds, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * rounds * BLOCK
    for k in range(rounds):
        at = first + k * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(dst + at, tl.load(src + at, mask=inside), mask=inside)
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="sys")


def _wait(flag, epoch, blocks, error, code, limit_ns):
    due = tl.load(epoch) * blocks
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen < due:
        failed = tl.load(error, volatile=True)
        begin = globaltimer()
        spent = begin - begin
        while (seen < due) & (failed == 0) & (spent < limit_ns):
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            spent = globaltimer() - begin
        if seen < due:
            tl.atomic_cas(error, 0, code)
    tl.debug_barrier()


def _signal(flag):
    tl.atomic_add(flag, 1, sem="release", scope="sys")


push_kernel = triton.jit(_push, do_not_specialize=["rounds"])
wait_kernel = triton.jit(_wait, do_not_specialize=["blocks", "code"])
signal_kernel = triton.jit(_signal)
