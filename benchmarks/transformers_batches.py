# SPDX-License-Identifier: Apache-2.0
"""The same prompts through the `generate` of transformers, in batches padded on the left, where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence


def installed() -> bool:
    """Whether torch and transformers are there; neither is imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


class Theirs:
    """A checkpoint folder's model as transformers runs it, greedily, on the CPU in float32."""

    def __init__(self, folder: str | os.PathLike[str]):
        import torch
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(torch.float32).eval()
        # No token ends a text, so that every answer is as long as wanted.
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, rows: int) -> list[list[int]]:
        """`new_tokens` tokens for each prompt, `rows` prompts at a time."""
        import torch

        outputs: list[list[int]] = []
        for start in range(0, len(prompts), rows):
            batch = prompts[start : start + rows]
            width = max(map(len, batch))
            pads = [width - len(prompt) for prompt in batch]
            ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(pads, batch, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
            with torch.inference_mode():
                found = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens)
            outputs += found[:, width:].tolist()
        return outputs
