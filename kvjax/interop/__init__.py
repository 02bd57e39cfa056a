# SPDX-License-Identifier: Apache-2.0
"""Events in the forms that routers and dashboards outside of kvjax read.

Nothing else in kvjax imports this room. `kvjax.interop.vllm` needs msgspec and pyzmq: `pip install "kvjax[wires]"`.
`trtllm`, `trace` and `log` need nothing more than kvjax does; the picture of `log` needs matplotlib: `kvjax[plot]`.
"""

from kvjax.interop.nodes import NodeMap

__all__ = ["NodeMap"]
