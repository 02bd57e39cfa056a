# SPDX-License-Identifier: Apache-2.0
"""The machine with a state on a mesh of heads and context: the oracle's answers, equal on every device."""

import jax
import numpy as np
import pytest
from hypothesis.stateful import initialize, invariant
from jax.sharding import NamedSharding, PartitionSpec

from tests.mesh import mesh_of
from tests.oracle.machine import CacheMachine, num_blocks


class MeshMachine(CacheMachine):
    """The same requests. The metadata is not divided, so that no device needs another's."""

    @initialize(blocks=num_blocks)
    def start(self, blocks):
        super().start("windows, retention", blocks)
        with mesh_of(2, 2, names=("heads", "context")) as mesh:
            self.state = jax.device_put(self.state, NamedSharding(mesh, PartitionSpec()))

    @invariant()
    def every_device_has_the_same(self):
        for leaf in jax.tree.leaves(self.state):
            first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
            assert len(others) == 3 and all(np.array_equal(first, other) for other in others)


TestMesh = pytest.mark.slow(MeshMachine.TestCase)
