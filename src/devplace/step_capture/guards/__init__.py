"""What a step takes for granted beside its tensors. Three parts:

1. What differs between two runs of a step: `twice`, and `host_state` for generators and clocks.
2. What outlives the step and was written: `written`; what it kept out of reach: `twice`.
3. What it reads of plain values, checked at each call: `frames` follows the functions, `code_names`
   says what their code names, `attribute_reads` finds the values and `rechecked` looks at them
   again (in `devplace.run.assumptions`, with modes, `requires_grad`, versions and identities).

`values` says which values can be kept, and when two are the same.
"""
