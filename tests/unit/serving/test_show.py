# SPDX-License-Identifier: Apache-2.0
"""The output of `show_requests` and `show_step`. docs/ideas/scheduler.md has a whole story."""

import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving import init_serving, show_requests, show_step
from kvjax.serving.admit import Admitted
from kvjax.serving.decode import SampledTokens
from kvjax.serving.preempt import Retired
from kvjax.serving.prefill import Chunks
from kvjax.serving.requests import Finish, Stage
from kvjax.serving.serve import Served
from kvjax.serving.speculation_stats import DraftStats
from tests.drive import PLAIN, TIERS

W, R, D, C = Stage.WAITING, Stage.RUNNING, Stage.DONE, Stage.CANCELLED
NO_BLOCKS = "12 blocks: 0 active, 0 cached, 12 empty; 0 of 48 slots filled; "
LEGEND = "P: prompt, G: generated, in lower case where its row has not computed it; .: still to generate"


def ints(*values):
    return jnp.array(values, jnp.int32)


def serving(spec=PLAIN, rows=(-1,) * 4, committed=(0,) * 4, out_of_blocks=(False,) * 4, leads=(False,) * 4, **values):
    """Requests with these values, in the given rows. The cache has only the numbers of tokens of its rows."""
    found = init_serving(kvjax.Cache.create(spec), [24] * 7, greedy=True)
    seqs = found.cache.state.seqs.replace(length=ints(*committed), committed=ints(*committed))
    cache = found.cache.replace(state=found.cache.state.replace(seqs=seqs))
    requests = found.requests.replace(**{name: ints(*numbers) for name, numbers in values.items()})
    return found.replace(
        cache=cache, requests=requests, row=ints(*rows), out_of_blocks=jnp.array(out_of_blocks), leads=jnp.array(leads),
        steps=jnp.int32(9),
    )  # fmt: skip


def lines(text):
    return textwrap.dedent(text).strip("\n")


MANY = {
    "stage": (R, R, R, D, W, W, C), "prompt": (5, 9, 9, 4, 10, 3, 6), "num_tokens": (7, 9, 9, 6, 10, 5, 8),
    "max_tokens": (8, 15, 12, 6, 14, 9, 9), "parent": (-1, -1, 1, -1, -1, -1, -1), "priority": (0, 0, 0, 0, 0, 2, 0),
    "arrival": (0, 1, 2, 3, 4, 5, 6), "passed": (0, 0, 0, 0, 3, 0, 0), "preemptions": (0, 0, 0, 0, 0, 1, 0),
    "finish": (0, 0, 0, Finish.STOP, 0, 0, Finish.CANCELLED), "cached": (0, 0, 0, 0, 0, 0, 4),
}  # fmt: skip
FULL = {"rows": (0, 1, 2, 3), "committed": (6, 3, 0, 5), "leads": (False, True, False, False)}


def test_requests_in_rows_waiting_and_over():
    assert show_requests(serving(**MANY, **FULL)) == lines(f"""
        after 9 steps of the model: 3 run, 2 wait, 2 are over
        {NO_BLOCKS}3 of 4 rows in use
        {LEGEND}
        row 0  request 0  7 of 8 tokens: decodes                             PPPP PGg.
        row 1  request 1  9 of 15 tokens: 6 pending, leads samples           PPPp pppp p... ...
        row 2  request 2  9 of 12 tokens: waits for the prompt of request 1  pppp pppp p...
        row 3  request 3  6 of 6 tokens: over (stop)                         PPPP Gg
        waits  request 5  5 of 9 tokens, priority 2, preemptions 1           pppg g... .
        waits  request 4  10 of 14 tokens, passed 3                          pppp pppp pp.. ..
        over   request 6  cancelled, 2 generated, 4 cached
    """)


def test_rows_of_others_and_rows_that_stall():
    six = [0] * 6
    shown = show_requests(
        serving(
            rows=(-1, 0, -1, -1), committed=(5, 6, 0, 0), out_of_blocks=(False, True, False, False), stage=(R, *six),
            prompt=(9, *six), num_tokens=(9, *six), max_tokens=(15, *six),
        )
    )  # fmt: skip
    assert shown == lines(f"""
        after 9 steps of the model: 1 run, 0 wait, 0 are over
        {NO_BLOCKS}2 of 4 rows in use
        {LEGEND}
        row 0             5 tokens, of no request here
        row 1  request 0  9 of 15 tokens: 3 pending, out of blocks  PPPP PPpp p... ...
    """)


def test_in_few_columns_a_letter_stands_for_several_tokens_and_requests_are_counted():
    _, *shown = show_requests(serving(**MANY, **FULL), width=72, max_lines=2).splitlines()
    assert max(map(len, shown)) <= 72
    assert "\n".join(shown[2:]) == lines("""
        P: prompt, G: generated, in lower case where its row has not computed
        it; .: still to generate; a letter for 2 tokens
        row 0  request 0  7 of 8 tokens: decodes                    PP G.
        row 1  request 1  9 of 15 tokens: 6 pending, leads samples  Pp pp .. ..
        and 2 more rows in use
        waits  request 5  5 of 9 tokens, priority 2, preemptions 1  pg .. .
        waits  request 4  10 of 14 tokens, passed 3                 pp pp p. .
        over   request 6  cancelled, 2 generated, 4 cached
    """)
    *_, wait, over = show_requests(serving(**MANY, **FULL), width=65, max_lines=1).splitlines()
    assert (wait, over) == ("and 1 more that wait", "over   request 6  cancelled, 2 generated, 4 cached")


def test_each_group_of_blocks_is_counted():
    shown = show_requests(serving(TIERS), width=200).splitlines()
    assert shown[0] == "after 9 steps of the model: 0 run, 0 wait, 0 are over"
    assert [line.split(" blocks")[0] for line in shown[1:3]] == ["group 0: 12", "group 1: 12"]


def served(n=1, mixed=False, released=(), preempted=(), admitted=(), chunks=(), chosen=((), (), (), ())):
    """The `Served` of a step, for 4 rows and blocks of up to 4 steps."""
    entered = np.full((4, 3), -1, np.int32)
    entered[: len(admitted)] = np.array(admitted, np.int32).reshape(-1, 3)
    dealt = np.full((2, 2), -1, np.int32)
    dealt[: len(chunks)] = np.array(chunks, np.int32).reshape(-1, 2)
    tokens = np.array([[*row, *[-1] * (4 - len(row))] for row in chosen], np.int32)
    return Served(
        retired=Retired(np.isin(np.arange(4), released), np.array([*preempted, *[-1] * (4 - len(preempted))])),
        admitted=Admitted(*entered.T), n=jnp.int32(n), mixed=jnp.bool_(mixed), chunks=Chunks(*dealt.T),
        chosen=SampledTokens(jnp.stack([jnp.asarray(tokens), jnp.zeros((4, 4), jnp.int32)])),
    )  # fmt: skip


NOTHING = "retire   -\ngrow     blocks for 1 step\nadmit    -\ncompute  -\nchoose   -"
BUSY = {
    "mixed": True, "released": (0, 3), "preempted": (5,), "admitted": ((2, 0, 8), (4, 3, 0)),
    "chunks": ((0, 2), (3, 0)), "chosen": ((7,), (), (9,), ()),
}  # fmt: skip


@pytest.mark.parametrize(
    ("did", "shown"),
    [
        ({}, NOTHING),
        ({"n": 0}, NOTHING.replace("blocks for 1 step", "blocks refused")),
        (
            {"n": 4, "chosen": ((7, 8), (), (1_000, 2, 3), ())},
            """
            retire   -
            grow     blocks for 4 steps
            admit    -
            compute  a block of 3 steps
            choose   row 0: 7 8; row 2: 1000 2 3
            """,
        ),
        (
            BUSY,
            """
            retire   row 0 released; row 3 released; request 5 preempted
            grow     blocks for 1 step
            admit    request 2 in row 0, 8 cached; request 4 in row 3, 0 cached
            compute  a mixed step; row 0 a chunk of 2; row 3 a chunk of 0
            choose   row 0: 7; row 2: 9
            """,
        ),
    ],
)
def test_the_parts_of_a_step(did, shown):
    assert show_step(served(**did)) == lines(shown)


def test_a_part_that_does_much_has_several_lines():
    assert show_step(served(**BUSY), width=40).splitlines()[:2] == [
        "retire   row 0 released; row 3 released;",
        "         request 5 preempted",
    ]


def test_drafts_are_counted_where_there_are_any():
    found = serving(**MANY, **FULL)
    numbers = np.zeros(7, np.int32)
    drafted, accepted = numbers.copy(), numbers.copy()
    drafted[[0, 3]], accepted[[0, 3]] = (12, 1_400), (3, 1_000)
    stats = DraftStats.start(7).replace(drafted=drafted, accepted=accepted)
    text = show_requests(found.replace(requests=found.requests.replace(draft_stats=stats)), width=140)
    assert "7 of 8 tokens: decodes, 3 of 12 drafts accepted" in text
    assert "1,000 of 1,400 drafts accepted" in text and text.count("drafts accepted") == 2
