# SPDX-License-Identifier: Apache-2.0
"""The log of a run says which blocks are missing, once for each kind of shortage."""

import numpy as np

import kvjax
from kvjax.serving import Scheduler
from kvjax.serving.shortages import ShortageLog, explain
from tests.serving_kit import ADMIT, BEFORE, MODEL, OPTIONS, make_cache


def test_a_prompt_whose_blocks_other_code_holds_is_reported(caplog):
    """Rows 1 and 2 hold 4 of 10 blocks, and never end: the prompt would wait for ever."""
    cache = make_cache(10)
    rows, tokens = np.array([1, 2], np.int32), np.zeros((2, 16), np.int32) + np.array([[1], [2]], np.int32)
    cache, _ = ADMIT(
        cache, rows, tokens, np.full(2, BEFORE, np.int32), namespace=np.zeros(2, np.int32), retention=None,
        reserve_tokens=None, now=np.int32(0),
    )  # fmt: skip
    (output,), _, _ = kvjax.generate(MODEL, cache, [[3] * 25], **OPTIONS)
    wanted = "8 blocks wanted for 31 tokens, 10 in the cache, 6 of them free; rows and pins hold the others"
    assert (output.finish, output.reason) == ("no_blocks", wanted)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"request 0 would wait for ever for other code, and ended with no_blocks: {wanted}")


def test_each_kind_of_shortage_is_written_once(caplog):
    log = ShortageLog()
    for number in (4, 5):
        log.write("was preempted", number, "reason")
        log.write("ended with no_blocks", number, "reason")
    lines = [record.getMessage() for record in caplog.records]
    assert [line[:30] for line in lines] == ["request 4 was preempted: reaso", "request 4 ended with no_blocks"]


def test_the_group_with_the_largest_lack_is_named():
    layers = [kvjax.LayerSpec(1, 4), kvjax.LayerSpec(1, 4, window=8)]
    spec = kvjax.make_spec(layers, num_blocks={None: 6, 8: 9}, max_seqs=1, max_length=64, block_size=4)
    shortage = explain(kvjax.init(spec), Scheduler(chunk=4), 40)
    assert not shortage.is_held
    assert shortage.reason == "group 0, full attention: 10 blocks wanted for 40 tokens, 6 in the cache, 6 of them free"
