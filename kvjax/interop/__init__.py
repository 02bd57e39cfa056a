# SPDX-License-Identifier: Apache-2.0
"""Events in the forms that routers and dashboards outside of kvjax read.

Nothing else in kvjax imports this room. `vllm`, and what reads `trtllm`'s lines, need the extra `wires`, as in
`pip install "kvjax[wires]"`; `agent` and `metrics` need those of their names. What writes `trtllm`'s lines, `trace` and
`log` need nothing more than kvjax does.
"""

from kvjax.interop.hub import combine_listeners

__all__ = ["combine_listeners"]
