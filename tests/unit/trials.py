# SPDX-License-Identifier: Apache-2.0
"""Specs for trials: a small cache of each kind."""

import kvjax
from kvjax import LayerSpec
from tests.drive import EXTRA

OPTIONS = {"num_blocks": 8, "max_seqs": 3, "max_length": 16, "block_size": 4}
TIERS = kvjax.make_spec(num_host_blocks=4, **OPTIONS)
SPECS = {
    "extra ids": EXTRA,
    "windows": kvjax.make_spec([LayerSpec(1, 1), LayerSpec(1, 1, 6, 1)], **OPTIONS),
    "windows alone": kvjax.make_spec([LayerSpec(1, 1, 5)], **OPTIONS),
    "tiers": TIERS,
    "windows, tiers": kvjax.make_spec([LayerSpec(1, 1), LayerSpec(1, 1, 6)], num_host_blocks=3, **OPTIONS),
}
