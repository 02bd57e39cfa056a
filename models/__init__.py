# SPDX-License-Identifier: Apache-2.0
"""Flax NNX decoders over the paged cache, and checkpoints in Hugging Face format. Runs from the checkout."""

from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from models.loading import load, save
from models.rope import Rope

__all__ = ["Decoder", "LayerConfig", "ModelConfig", "Rope", "load", "save"]
