# SPDX-License-Identifier: Apache-2.0
"""The verbs: pure transitions `(state, request) -> (state, events)`, one per file.

A sequence's life: `admit` finds what is cached of its prompt and reserves blocks for the rest; the model computes;
`commit` says what was written, and only then blocks become findable; `extend` reserves blocks for the next tokens;
`release` lets go, and findable blocks stay cached. A verb that cannot be done returns the state as it was and says
why in `events.status`. The K/V bytes follow by `kvjax.apply(pools, events)`; `Cache` does both at once. The
caller owns `jit` and donation: jit a verb together with the copies and the model step.
"""
