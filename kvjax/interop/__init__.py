# SPDX-License-Identifier: Apache-2.0
"""Events in the formats of other routers and dashboards.

Nothing else in kvjax imports this package. `vllm` and the readers of `trtllm` need the extra `wires`, as in
`pip install "kvjax[wires]"`; `agent` and `metrics` need the extras of the same names. The writer of `trtllm`, `trace`
and `log` need no extra.
"""

from kvjax.interop.hub import combine_listeners

__all__ = ["combine_listeners"]
