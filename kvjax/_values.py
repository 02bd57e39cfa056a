# SPDX-License-Identifier: Apache-2.0
"""The text of values: enumerations, and policies, which pickle too."""

from __future__ import annotations

import enum
import pickle
from typing import Any


class Named(enum.IntEnum):
    """Numbers that print as their names, also in messages: `assert events.ok, Status(...)`."""

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


def shown(policy: Any) -> str:
    """A policy's name and parameters as a call, `cost_aware(balance=24576)`; all its fields if it has no name."""
    parts = policy.parameters if policy.name else policy._asdict().items()
    return f"{policy.name or type(policy).__name__}({', '.join(f'{name}={value!r}' for name, value in parts)})"


def reduced(policy: Any) -> tuple[Any, ...]:
    """A policy's pickle: its fields, so that its functions are imported again.

    Raises:
      pickle.PicklingError: naming the field that would not come back equal, such as a lambda.
    """
    for field, value in policy._asdict().items():
        try:
            why = "" if pickle.loads(pickle.dumps(value)) == value else f"{value!r} comes back as another"
        except Exception as error:  # whatever the classes of its parts raise
            why = str(error) or repr(error)
        if why:
            raise pickle.PicklingError(
                f"policy: got {policy}, whose {field} cannot be pickled ({why}), wanted functions that can be "
                "imported: define them by def at the top of a module"
            )
    return type(policy), tuple(policy)
