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


def _wait(
    flags, blocks, epoch, error, first, count, limit_ns, WIDTH: tl.constexpr, STRIDE: tl.constexpr
):
    lane = tl.arange(0, WIDTH)
    mine = lane < count
    due = tl.load(epoch) * tl.load(blocks + first + lane, mask=mine, other=0)
    at = flags + (first + lane) * STRIDE
    seen = tl.atomic_add(at, 0, mask=mine, sem="acquire", scope="sys")
    late = mine & (seen < due)
    num_late = tl.sum(late.to(tl.int32))
    if num_late > 0:
        failed = tl.load(error, volatile=True)
        begin = globaltimer()
        spent = begin - begin
        while (num_late > 0) & (failed == 0) & (spent < limit_ns):
            seen = tl.atomic_add(at, 0, mask=mine, sem="acquire", scope="sys")
            late = mine & (seen < due)
            num_late = tl.sum(late.to(tl.int32))
            failed = tl.load(error, volatile=True)
            spent = globaltimer() - begin
        if num_late > 0:
            code = tl.min(tl.where(late, first + lane + 1, 1 << 30))
            tl.atomic_cas(error, 0, code)
    tl.debug_barrier()


def _stamp(stamps, at):
    tl.store(stamps + at, globaltimer())


push_kernel = triton.jit(_push, do_not_specialize=["rounds"])
wait_kernel = triton.jit(_wait, do_not_specialize=["first", "count"])
stamp_kernel = triton.jit(_stamp, do_not_specialize=["at"])
