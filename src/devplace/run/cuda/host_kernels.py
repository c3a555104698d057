# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Triton kernels that pass tensors and flags through pinned host memory.

Flags there are stored and loaded as they are, never added to: without atomics on the bus, an
addition by a GPU could undo what the CPU stores meanwhile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

BLOCK = 2048
WARPS = 8


def _store_release(at, value):
    """One thread stores, after all that its block stored before the last barrier."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [at.to(tl.uint64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def _load_acquire(at):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];",
        "=r,l",
        [at.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


store_release = triton.jit(_store_release)
load_acquire = triton.jit(_load_acquire)


def _carry(src, dst, flag, epoch, count, rounds, SIGNALS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * rounds * BLOCK
    for k in range(rounds):
        at = first + k * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(dst + at, tl.load(src + at, mask=inside, volatile=True), mask=inside)
    if SIGNALS:
        tl.debug_barrier()
        store_release(flag, tl.load(epoch))


def _await(
    flags, epoch, error, first, code, count, limit_ns, WIDTH: tl.constexpr, STRIDE: tl.constexpr
):
    lane = tl.minimum(tl.arange(0, WIDTH), count - 1)
    at = flags + (first + lane) * STRIDE
    due = tl.load(epoch)
    late = load_acquire(at) < due
    num_late = tl.sum(late.to(tl.int32))
    if num_late > 0:
        failed = tl.load(error, volatile=True)
        begin = globaltimer()
        spent = begin - begin
        while (num_late > 0) & (failed == 0) & (spent < limit_ns):
            late = load_acquire(at) < due
            num_late = tl.sum(late.to(tl.int32))
            spent = globaltimer() - begin
        if num_late > 0:
            found = tl.min(tl.where(late, code + lane + 1, 1 << 30))
            tl.atomic_cas(error, 0, found)
    tl.debug_barrier()


carry_kernel = triton.jit(_carry, do_not_specialize=["rounds"])
await_kernel = triton.jit(_await, do_not_specialize=["first", "code", "count"])
