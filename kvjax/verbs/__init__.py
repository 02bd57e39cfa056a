# SPDX-License-Identifier: Apache-2.0
"""The verbs: pure transitions `(state, request) -> (state, events)`, each in a file.

A sequence's life has five steps:

1. `admit` finds the cached prefix of its prompt and reserves blocks for the rest.
2. The model computes K/V.
3. `commit` records which K/V are written. Blocks become findable only then.
4. `extend` reserves blocks for the next tokens.
5. `release` frees the row. Findable blocks stay cached.

A refused verb returns the state unchanged, and `events.status` gives the reason. `kvjax.apply(pools, events)`
then makes the copies of K/V bytes. `Cache` does both at once. You decide on `jit` and donation: jit a verb together
with the copies and the model step.
"""
