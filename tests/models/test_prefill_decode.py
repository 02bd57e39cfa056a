# SPDX-License-Identifier: Apache-2.0
"""Prompts that one process has computed, and another one answers."""

import re
import sys

import pytest

from models import prefill_decode
from tests.drive import output_of


def test_prompts_share_documents_and_end_within_a_block():
    pairs = prefill_decode.prompts()
    assert pairs == prefill_decode.prompts()
    lengths = {len(prompt) for prompt, _ in pairs}
    assert len(pairs) == prefill_decode.DOCUMENTS * prefill_decode.QUESTIONS == len({tuple(one) for one, _ in pairs})
    assert max(lengths) + prefill_decode.NEW <= prefill_decode.LENGTH


@pytest.mark.slow
def test_two_processes_answer_as_one_does_and_prompts_are_computed_once():
    """The command fails by itself if tokens differ, or if more than a block of a prompt is computed again."""
    out = output_of(sys.executable, "-m", "models.prefill_decode")
    assert "12 answers equal those of one process: True; 12 are right" in out
    whole = sum(len(prompt) // prefill_decode.BLOCK for prompt, _ in prefill_decode.prompts()) * prefill_decode.BLOCK
    assert re.search(rf"^decode .* {whole:,} ?$", out, re.MULTILINE)
