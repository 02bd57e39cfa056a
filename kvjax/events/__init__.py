# SPDX-License-Identifier: Apache-2.0
"""Events: the changes of a transition, as data. They order the moves of bytes, and let readers follow the index.

Inside `jit` events are arrays of a fixed size with padding. On the host they are a list of dicts. They obey a law:
`fold(events)` gives exactly the index of the state returned with them, from any snapshot and for any interleaving.
"""

from kvjax.events.host_events import HostEvents, listened
from kvjax.events.index import NodeMap
from kvjax.events.listeners import Listeners
from kvjax.events.log import EventLog, append, init_log
from kvjax.events.mirror import Mirror, fold, index_of, snapshot, snapshot_log, to_list
from kvjax.events.records import EventKind, Events, Status
from kvjax.events.totals import Totals, counts
from kvjax.events.transfer import Transfer

__all__ = [
    "EventKind",
    "EventLog",
    "Events",
    "HostEvents",
    "Listeners",
    "Mirror",
    "NodeMap",
    "Status",
    "Totals",
    "Transfer",
    "append",
    "counts",
    "fold",
    "index_of",
    "init_log",
    "listened",
    "snapshot",
    "snapshot_log",
    "to_list",
]
