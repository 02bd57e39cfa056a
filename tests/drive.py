# SPDX-License-Identifier: Apache-2.0
"""What tests of many kinds need to drive a cache."""

from collections.abc import Callable
from typing import Any

import kvjax


def verb(name: str) -> Callable[..., Any]:
    """A verb, or another function of a state, by its name, from whichever module exports it."""
    return next(getattr(home, name) for home in (kvjax, kvjax.tiers, kvjax.debug, kvjax.events) if hasattr(home, name))
