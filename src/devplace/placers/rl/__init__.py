"""Placers that learn by trying: one readable file per published system, shared parts beside them.

`grouping` (what is decided together), `features` (what a policy sees), `environment` (what a
placement costs), `penalties` (what counts as bad), `losses` and `policies` (pure functions),
`seq2seq`, `gcn` and `mlp` (networks), `training` (seeds, curves, checkpoints). Importing a system
loads torch; importing this package does not.
"""
