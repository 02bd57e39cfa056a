# SPDX-License-Identifier: Apache-2.0
"""Flax NNX decoders over the paged cache, and Hugging Face checkpoints. In the wheel, it is called `kvjax_models`."""

try:
    from .config import LayerConfig, ModelConfig
    from .decoder import Decoder, first_layers, scanned, streaming, unrolled
    from .loading import load, save
    from .rope import Rope
except ModuleNotFoundError as error:
    raise ImportError(f'{__name__} needs {error.name}: pip install "kvjax[models]"') from error

__all__ = [
    "Decoder",
    "LayerConfig",
    "ModelConfig",
    "Rope",
    "first_layers",
    "load",
    "save",
    "scanned",
    "streaming",
    "unrolled",
]
