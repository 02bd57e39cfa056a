# SPDX-License-Identifier: Apache-2.0
"""Checks a wheel installed without extras: the core works, and other modules name their missing extra."""

import importlib
import importlib.util
import io
import json
import pathlib

import kvjax
import pallas_kernels
from kvjax.interop import log, trace, trtllm
from kvjax.research import log_report, plots

for package in (kvjax, pallas_kernels):
    home = pathlib.Path(package.__file__).parent
    assert "site-packages" in home.parts, home
    assert (home / "py.typed").exists(), home
for absent in ("models", "tests", "benchmarks", "flax", "matplotlib"):
    assert importlib.util.find_spec(absent) is None, f"{absent} came with the wheel"

spec = kvjax.make_spec(num_blocks=4, max_seqs=2, max_length=16, block_size=4)
state = kvjax.init(spec)
kvjax.check(state)
print(kvjax.show(state))
message = ""
try:
    kvjax.debug.plot_blocks(state)
except ImportError as error:
    message = str(error)
assert "kvjax[plot]" in message, message or "plot_blocks worked without matplotlib"
state, events = kvjax.admit(state, 0, list(range(8)), 8)
lines = trtllm.Writer(spec).lines(events)
assert len(lines) == 1 and json.loads(lines[0])["data"]["type"] == "created", lines
assert log.entry(events)["queried"] == 8
found = io.StringIO()
with trace.Trace(spec, found) as traced:
    traced.write(events)
assert any(event["name"] == "admission" for event in json.loads(found.getvalue()))
message = ""
try:
    plots.plot_log(log_report([]))
except ImportError as error:
    message = str(error)
assert "kvjax[plot]" in message, message or "the plot of a log worked without matplotlib"
for wire, extra in (("vllm", "wires"), ("readers.trtllm", "wires"), ("agent", "agent"), ("metrics", "metrics")):
    message = ""
    try:
        importlib.import_module(f"kvjax.interop.{wire}")
    except ImportError as error:
        message = str(error)
    assert f"kvjax[{extra}]" in message, message or f"kvjax.interop.{wire} worked without its extra"
message = ""
try:
    import kvjax_models  # noqa: F401
except ImportError as error:
    message = str(error)
assert message == 'kvjax_models needs flax: pip install "kvjax[models]"', message
print("wheel: kvjax and pallas_kernels work from", pathlib.Path(kvjax.__file__).parent)
