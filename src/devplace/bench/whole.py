"""Turn the numbers of a file into integers: choose the unit, report any loss."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor

_MOST = 2**58
_SLACK = Fraction(1, 10**8)


def whole_times(
    columns: Sequence[Sequence[float]], per_unit: int
) -> tuple[list[list[int]], int, bool]:
    """Columns of times in whole units.

    The unit is made finer by powers of ten until rounding loses at most 1e-8 of the smallest sum,
    as far as 64 bits go.

    Args:
        columns: Times in the file's unit. Rounding is judged by the sums of the first two of them,
            where they are not 0.
        per_unit: Units in one of the file's, unless that is too coarse.

    Returns:
        The columns, units in one of the file's, and whether rounding is that small.
    """
    exact = [[Fraction(value) for value in column] for column in columns]
    totals = [sum(column, Fraction(0)) for column in exact]
    counts = [total for total in totals[:2] if total] or [total for total in totals if total]
    least, most = min(counts, default=Fraction(0)), max(totals)
    while True:
        found = [[round(value * per_unit) for value in column] for column in exact]
        lost = sum(
            abs(value * per_unit - whole)
            for column, row in zip(exact, found, strict=True)
            for value, whole in zip(column, row, strict=True)
        )
        is_close = lost <= _SLACK * least * per_unit
        if is_close or most * per_unit * 10 >= _MOST:
            return found, per_unit, is_close
        per_unit *= 10


def whole_sizes(sizes: Sequence[float], limit: float) -> tuple[list[int], int, int, bool]:
    """Sizes, rounded up, and their limit, rounded down, in whole units.

    The unit is a byte unless sizes have fractions or do not fit 64 bits; what is larger than the
    limit may then become another size that is.

    Returns:
        Sizes, limit, the exponent `j` of the unit (`2^-j` bytes), and whether the same nodes fit
        together as before rounding.
    """
    exact, most = [Fraction(size) for size in sizes], Fraction(limit)
    total = sum(exact, Fraction(0))
    if total + most >= _MOST:
        exact = [min(size, most + 1) for size in exact]
        most = min(most, sum(exact, Fraction(0)))
        total = sum(exact, Fraction(0))
    fitting = [size for size in exact if size <= most]
    wanted = max((size.denominator.bit_length() - 1 for size in fitting), default=0)
    exponent = min(wanted, 58 - ceil(total + most + 1).bit_length())
    unit = Fraction(2) ** exponent
    found = [ceil(size * unit) for size in exact]
    is_exact = total <= most or all((size * unit).denominator == 1 for size in fitting)
    if total <= most:
        return found, max(floor(most * unit), sum(found)), exponent, is_exact
    return found, floor(most * unit), exponent, is_exact
