# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Triton kernels that only the probe needs."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


def _span(stamps, at):
    tl.store(stamps + at, globaltimer())
    tl.store(stamps + at + 1, globaltimer())


def _spin(spent_ns, limit_ns):
    begin = globaltimer()
    spent = begin - begin
    while spent < limit_ns:
        spent = globaltimer() - begin
    tl.store(spent_ns, spent)


span_kernel = triton.jit(_span, do_not_specialize=["at"])
spin_kernel = triton.jit(_spin)
