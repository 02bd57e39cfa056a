# SPDX-License-Identifier: Apache-2.0
"""Loops over a model and a cache: steps, decoding on the device, generation for many prompts."""

from kvjax._compile import compiler_options
from kvjax.model import Model
from kvjax.serving.generation import Progress, generate, stream
from kvjax.serving.interrupt import GenerationInterrupted
from kvjax.serving.loops import step
from kvjax.serving.output import Output
from kvjax.serving.sampling import Sampling

__all__ = [
    "GenerationInterrupted",
    "Model",
    "Output",
    "Progress",
    "Sampling",
    "compiler_options",
    "generate",
    "step",
    "stream",
]
