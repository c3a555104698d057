"""Published heuristics that place one op after the other while a schedule is built: HEFT, ETF,
Baechi's three, and Mayer et al.'s critical-path family.

They share `list_schedule` (a schedule under construction), `ledger` (its memory), `earliest` (the
earliest task first) and `coplace` (what stays together).
"""
