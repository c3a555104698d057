"""Published placers that learn by trying: a file per system, shared parts beside them.

`grouping` (what is decided together), `features` (what a policy sees), `environment` (what a
placement costs), `penalties` (what counts as bad), `losses` and `policies` (pure functions),
`seq2seq`, `gcn` and `mlp` (networks), `training` (seeds, curves, checkpoints); `random` and `climb`
learn nothing and act in the same space. Importing a system loads torch; importing this package,
`random` or `climb` does not.
"""

import devplace.placers  # noqa: F401 (its list names what is here, and is to be there first)
