# SPDX-License-Identifier: Apache-2.0
"""Lists the commands: `python -m models`."""

from __future__ import annotations

COMMANDS = {
    "generate": "text from a checkpoint in Hugging Face format, or a chat",
    "serve": "a server with OpenAI's HTTP API, for a checkpoint, or replicas of it on a Ray cluster",
    "talk": "a chat with SmolLM2 in the terminal, or a server for it",
    "convert": "a folder in Hugging Face format, from a GGUF file",
    "demo": "what the cache does, with the bundled model",
    "prefill_decode": "a server that computes prompts, and one that answers them, through a store",
    "verify": "logits and tokens of a checkpoint against a golden folder",
    "grpo": "a training loop around `rollout`, which teaches the bundled model to end its answers",
    "sparsity": "quality and time of attention that reads a part of the cache, for each policy and budget",
    "train": "the training of the bundled model",
}


def main() -> None:
    """Prints the list."""
    for name, purpose in COMMANDS.items():
        print(f"python -m {__spec__.parent}.{name:<15}{purpose}")
    print("Each takes --help.")


if __name__ == "__main__":
    main()
