# SPDX-License-Identifier: Apache-2.0
"""Events as they happen, in a file of JSON lines, and reports of such files.

`python -m kvjax.interop.log FILE [--plot out.png]` prints one.
"""

from kvjax.interop.log.plot import plot
from kvjax.interop.log.report import Report, report
from kvjax.interop.log.write import Log, entry

__all__ = ["Log", "Report", "entry", "plot", "report"]
