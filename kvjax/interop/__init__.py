# SPDX-License-Identifier: Apache-2.0
"""Events in the forms that routers and dashboards outside of kvjax read; and other libraries' models and trainers.

Nothing else in kvjax imports this room. `vllm`, and what reads `trtllm`'s lines, need the extra `wires`, as in
`pip install "kvjax[wires]"`; `agent` and `metrics` need those of their names. What writes `trtllm`'s lines, `trace` and
`log` need nothing more than kvjax does; the picture of `log` needs `plot`. `tunix`, a rollout engine over a `sampler`,
needs the extra `tunix`; the models of `decoders` need flax.
"""

from kvjax.interop.hub import together
from kvjax.interop.index import NodeMap

__all__ = ["NodeMap", "together"]
