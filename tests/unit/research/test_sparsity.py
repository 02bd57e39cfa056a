# SPDX-License-Identifier: Apache-2.0
"""Sparsity policies against the same rules in plain Python, and models that run with them."""

import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.pools import select_blocks, sparse_attention
from kvjax.research import sparsity
from kvjax.research.sparsity.policies import Scores
from models import loading, recall
from models import sparsity as command


def row(*theirs):
    """Names the rows of the vocabulary's page of which this is the test."""
    del theirs
    return lambda test: test


SIZE, COLUMNS = 4, 12
LENGTHS = [41, 22, 7]  # with the token of the step
BLOCKS = [11, 6, 2]
SPEC = kvjax.make_spec(
    [kvjax.LayerSpec(2, 8)],
    num_blocks=40,
    max_seqs=3,
    max_length=SIZE * COLUMNS,
    block_size=SIZE,
    dtype="float32",
    sparse=True,
)


def make_steps():
    """The scores of a prompt without its last two tokens, and of two steps with a token each."""
    rng = np.random.default_rng(0)
    pools = kvjax.init_pools(SPEC)
    pools = pools.with_pool(0, 0, jnp.asarray(rng.standard_normal(pools.arrays[0][0].shape), jnp.float32))
    tables = jnp.arange(3 * COLUMNS, dtype=jnp.int32).reshape(3, COLUMNS)
    made = []
    for missing in (2, 1, 0):
        lengths = jnp.asarray(LENGTHS, jnp.int32) - missing
        counts = lengths if missing == 2 else jnp.ones(3, jnp.int32)
        width = max(LENGTHS) - 2 if missing == 2 else 1
        positions = jnp.maximum(lengths[:, None] - width, 0) + np.arange(width, dtype=np.int32)[None]
        now = kvjax.pools.View((tables,), positions, lengths, (positions,), counts, spec=SPEC)
        q = jnp.asarray(rng.standard_normal((3, width, 4, 8)), jnp.float32)
        made.append(Scores(q, pools, 0, now, 0.3, index=None, scale=None, soft_cap=None))
    return made


@pytest.fixture(scope="module")
def steps():
    return make_steps()


def best(score, count, taken, held):
    """The columns that a row reads: all taken, and the best of the others that it holds."""
    others = sorted(held - taken, key=lambda column: -score[column])
    return taken | set(others[: max(count - len(taken), 0)])


def columns_of(columns):
    return [set(np.flatnonzero(row[:blocks]).tolist()) for row, blocks in zip(columns, BLOCKS, strict=True)]


BUDGETS = [math.ceil(0.3 * blocks) for blocks in BLOCKS]


@row("`StreamingLLMPress`")
def test_streaming_reads_the_first_and_the_last_blocks(steps):
    columns, _ = sparsity.streaming().choose(steps[2], None)
    assert kvjax.LayerSpec(2, 8, window=8, sink_tokens=SIZE).sink_tokens == SIZE  # for every request
    wanted = [{0, *range(blocks - max(count - 1, 1), blocks)} for blocks, count in zip(BLOCKS, BUDGETS, strict=True)]
    assert columns_of(columns) == wanted


@row("`SnapKVPress`")
@pytest.mark.parametrize("name", ["attention_mass", "snapkv", "h2o", "quest"])
def test_a_policy_reads_the_blocks_with_the_best_scores(name, steps):
    policy = sparsity.POLICIES[name]
    state = None if policy.init is None else policy.init(3, COLUMNS, 2, 8)
    prompt, middle, last = steps
    columns, state = policy.choose(prompt, state)
    assert np.array_equal(columns, prompt.all)
    held = [set(range(blocks)) for blocks in BLOCKS]
    columns, state = policy.choose(middle, state)
    if not policy.returns:  # the next step may read these, and a new one
        held = [seen | {blocks - 1} for seen, blocks in zip(columns_of(columns), BLOCKS, strict=True)]
    masses = {"attention_mass": lambda: last.mass(), "snapkv": lambda: prompt.mass(last=32), "h2o": lambda: state}
    score = last.bound(*last.bounds()) if name == "quest" else masses[name]()
    columns, _ = policy.choose(last, state)
    for row, got in enumerate(columns_of(columns)):
        taken = {BLOCKS[row] - 1}
        if name == "h2o":
            taken = set(range(BLOCKS[row] - math.ceil(0.5 * BUDGETS[row]), BLOCKS[row]))
        if name == "snapkv":
            taken |= set(range(math.ceil((LENGTHS[row] - 2) / SIZE), BLOCKS[row]))
        assert got == best(np.asarray(score)[row, : BLOCKS[row]], BUDGETS[row], taken, held[row])


def scores_at(length, rng):
    """The scores of a step with a token, or of a prompt of 19, of a row in other blocks each time."""
    is_prompt = length == 19
    pools = kvjax.init_pools(SPEC)
    pools = pools.with_pool(0, 0, jnp.asarray(rng.standard_normal(pools.arrays[0][0].shape), jnp.float32))
    positions = jnp.arange(0 if is_prompt else length - 1, length, dtype=jnp.int32)[None]
    lengths, counts = jnp.array([length], jnp.int32), jnp.array([positions.size], jnp.int32)
    now = kvjax.pools.View((jnp.arange(COLUMNS, dtype=jnp.int32)[None],), positions, lengths, (positions,), counts)
    q = jnp.asarray(rng.standard_normal((1, positions.size, 4, 8)), jnp.float32)
    return Scores(q, pools, 0, now.replace(spec=SPEC), 0.4, index=None, scale=None, soft_cap=None)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, policy in sparsity.POLICIES.items() if not policy.returns])
def test_a_block_that_a_step_did_not_read_never_returns(name):
    """Else the blocks held would be more than the study says. The budget grows with the row."""
    policy, rng = sparsity.POLICIES[name], np.random.default_rng(0)
    state = None if policy.init is None else policy.init(1, COLUMNS, 2, 8)
    _, state = policy.choose(scores_at(19, rng), state)
    held, counts = np.ones(COLUMNS, bool), []
    for length in range(20, SIZE * COLUMNS + 1):
        scores = scores_at(length, rng)
        columns, state = policy.choose(scores, state)
        read = np.asarray(columns & scores.all)[0]
        assert not np.any(read & ~held) and read[(length - 1) // SIZE]
        held = read | (np.arange(COLUMNS) > (length - 1) // SIZE)
        counts.append(int(read.sum()))
        assert counts[-1] <= scores.budget[0]
    assert counts[-1] == math.ceil(0.4 * COLUMNS)


@pytest.mark.long
def test_snapkv_keeps_blocks_of_the_prompt_however_many_come_after_it():
    policy, rng = sparsity.snapkv(), np.random.default_rng(0)
    _, state = policy.choose(scores_at(19, rng), policy.init(1, COLUMNS, 2, 8))
    for length in range(20, SIZE * COLUMNS + 1):
        columns, state = policy.choose(scores_at(length, rng), state)
    chosen = np.flatnonzero(columns[0])
    assert len(chosen) == 5 and chosen[0] < 5 and chosen[-3:].tolist() == [9, 10, 11]


@row("`TOVAPress`")
def test_the_last_token_of_a_prompt_may_choose_alone(steps):
    prompt, middle, _ = steps
    policy = sparsity.snapkv(window=1)
    _, state = policy.choose(prompt, policy.init(3, COLUMNS, 2, 8))
    columns, _ = policy.choose(middle, state)
    score = np.asarray(prompt.mass(last=1))
    for row, got in enumerate(columns_of(columns)):
        num_blocks = math.ceil((LENGTHS[row] - 1) / SIZE)
        budget = math.ceil(0.3 * num_blocks)
        assert got == best(score[row, :num_blocks], budget, {num_blocks - 1}, set(range(num_blocks)))


@row("`ObservedAttentionPress`")
def test_h2o_adds_the_mass_of_the_blocks_that_it_reads(steps):
    policy = sparsity.h2o()
    _, mass = policy.choose(steps[0], jnp.zeros((3, COLUMNS)))
    np.testing.assert_allclose(mass.sum(axis=1), [4 * (length - 2) for length in LENGTHS], rtol=1e-5)
    columns, after = policy.choose(steps[1], mass)
    is_read = np.isfinite(after)
    gained = np.where(is_read, after - mass, 0)
    np.testing.assert_allclose(gained.sum(axis=1), 4, rtol=1e-4)  # of each of four heads
    read = columns_of(columns)
    assert columns_of(is_read & np.asarray(steps[1].all)) == read


def test_quest_keeps_the_bounds_of_all_blocks_though_it_computes_one(steps):
    policy = sparsity.quest()
    _, state = policy.choose(steps[0], None)
    for scores in steps[1:]:
        _, state = policy.choose(scores, state)
        for kept, whole in zip(state, scores.bounds(), strict=True):
            np.testing.assert_array_equal(kept, whole)


@row("`RandomPress`")
def test_random_blocks_differ_from_step_to_step_and_keep_the_budget(steps):
    drawn = [columns_of(sparsity.random().choose(scores, None)[0])[0] for scores in steps[1:]]
    assert drawn[0] != drawn[1] and [len(columns) for columns in drawn] == [math.ceil(0.3 * 10), math.ceil(0.3 * 11)]


def choices(name, steps):
    """A policy's columns in each step, and the dtypes of its state before and after each."""
    policy = sparsity.POLICIES[name]
    state = None if policy.init is None else policy.init(3, COLUMNS, 2, 8)
    made, dtypes = [], [[x.dtype for x in jax.tree.leaves(state)]]
    for scores in steps:
        columns, state = policy.choose(scores, state)
        made.append(np.asarray(columns))
        dtypes.append([x.dtype for x in jax.tree.leaves(state)])
    return made, dtypes


@pytest.mark.parametrize("name", sparsity.POLICIES)
def test_64_bit_types_change_no_choice_and_no_state(name, steps):
    wanted, _ = choices(name, steps)
    with jax.enable_x64(True):
        made, dtypes = choices(name, make_steps())
    np.testing.assert_array_equal(made, wanted)
    assert all(each == dtypes[0] for each in dtypes) and jnp.float64 not in dtypes[0]


@pytest.fixture(scope="module")
def model():
    return loading.load(recall.CHECKPOINT)[0]


@pytest.mark.long
@row("`ScorerPress.score`", "`PyramidKVPress`, `PerLayerCompressionPress`")
def test_a_policy_of_ones_own_may_give_each_layer_another_budget(model):
    """A SparsityPolicy of Scores reads all blocks in layer 0, and the last two in layer 1."""
    seen = []

    def choose(scores, state):
        seen.append(type(scores))
        return scores.all if scores.is_prompt or scores.layer == 0 else scores.recent(2), state

    policy = sparsity.SparsityPolicy(choose)
    said = sparsity.follow(model, model.layer_specs(), needles(1), policy=policy, block_size=4)
    assert set(seen) == {Scores} and said.blocks_read == (said.blocks + 2) / 2


def needles(rows, seed=0):
    tokens, (mark,) = recall.make_batch(np.random.default_rng(seed), rows, 24, 1)
    return sparsity.Texts(tokens[:, : mark + 2], 24 * recall.FACT_TOKENS)


@pytest.mark.long
def test_two_programs_serve_all_budgets_and_needles(model):
    """One for prompts and one for steps, however many blocks they read. A text has fewer rows than the needles."""
    traced = []

    def choose(scores, state):
        traced.append((scores.layer, scores.is_prompt))
        return scores.all if scores.is_prompt else scores.recent(scores.budget), state

    texts, asked = needles(1), needles(5, seed=1)
    options = {"policies": {"recent": sparsity.SparsityPolicy(choose)}, "budgets": [0.1, 0.5, 1.0], "block_size": 4}
    _, *lines = sparsity.study(model, model.layer_specs(), texts, asked, **options)
    assert sorted(traced) == [(0, False), (0, True), (1, False), (1, True)]
    assert lines[0].bytes_read < lines[1].bytes_read < lines[2].bytes_read
    whole = sparsity.follow(model, model.layer_specs(), asked, block_size=4)
    assert lines[2].recall == np.mean(whole.greedy[:, -1] == asked.tokens[:, -1]) and lines[0].recall < lines[2].recall


@pytest.mark.long
@row("`compression_ratio`")
def test_a_model_reads_a_quarter_and_still_finds_its_needles_by_quests_bound(model):
    """And not by recent blocks, which do not have them."""
    texts = needles(8)
    found = {}
    for name in ("quest", "streaming"):
        policy = sparsity.POLICIES[name]
        said = sparsity.follow(model, model.layer_specs(), texts, policy=policy, budget=0.25, block_size=4)
        found[name] = np.mean(said.greedy[:, -1] == texts.tokens[:, -1])
        assert said.blocks == math.ceil((texts.tokens.shape[1] - 1) / 4)
        assert said.blocks_read == math.ceil(0.25 * said.blocks)
        assert said.blocks_held == (said.blocks if policy.returns else said.blocks_read)
    assert found["quest"] == 1 and found["streaming"] < 0.7


@pytest.mark.long
def test_a_budget_of_all_blocks_is_full_attention(model):
    texts = needles(2)
    whole = sparsity.follow(model, model.layer_specs(), texts, block_size=4)
    for policy in sparsity.POLICIES.values():
        got = sparsity.follow(model, model.layer_specs(), texts, policy=policy, block_size=4)
        np.testing.assert_allclose(got.log_probabilities, whole.log_probabilities, atol=2e-4)
        assert got.blocks_read == got.blocks_held == got.blocks


def small_spec(model):
    sizes = {"num_blocks": 4, "max_seqs": 1, "max_length": 16, "block_size": 4}
    return kvjax.make_spec(model.layer_specs(), dtype="float32", sparse=True, **sizes)


@pytest.mark.long
@pytest.mark.parametrize("width", [1, 16], ids=["step", "prompt"])
def test_a_state_of_mass_costs_no_copy_of_the_pools(model, width):
    """A layer's mass is read before the next layer writes, though the model's output does not depend on it."""
    sizes = {"num_blocks": 512, "max_seqs": 1, "max_length": 64, "block_size": 4}
    spec = kvjax.make_spec(model.layer_specs(), dtype="float32", sparse=True, **sizes)
    policy, state, pools = sparsity.h2o(), kvjax.init(spec), kvjax.init_pools(spec)

    def run(model, pools, states, state, tokens, budget):
        options = {"policy": policy, "budget": budget, "states": states}
        return sparsity.call_sparse(model, tokens, pools, kvjax.view(state, width), **options)

    given = model, pools, sparsity.init_states(policy, spec), state, np.zeros((1, width), np.int32), np.float32(0.5)
    program = jax.jit(run, donate_argnums=1).lower(*given).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.5 * sum(x.nbytes for x in jax.tree.leaves(pools))


@pytest.mark.long
def test_a_scan_of_layers_refuses_a_policy_with_a_state(model):
    scanned = loading.scanned(model)
    spec = small_spec(model)
    state, _ = kvjax.admit(kvjax.init(spec), 0, np.arange(8), 8)
    policy = sparsity.h2o()
    options = {"policy": policy, "budget": 0.5, "states": sparsity.init_states(policy, spec)}
    given = np.zeros((1, 8), np.int32), kvjax.init_pools(spec), kvjax.view(state, 8)
    with pytest.raises(ValueError, match="model: got a scan of layers, wanted an unrolled model"):
        sparsity.call_sparse(scanned, *given, **options)


@pytest.mark.long
@row("`with press(model)`")
def test_a_context_reaches_the_calls_in_it_and_no_others(model):
    """Though kvjax keeps the trace of a model for calls with equal shapes."""
    seen = []

    def only_own(q, pools, layer, view, **options):
        seen.append(layer)
        return select_blocks(view, np.zeros(view.tables[0].shape[1], bool))

    spec = small_spec(model)
    cache = kvjax.Cache.create(spec)
    cache, _ = cache.admit(0, np.arange(10, 20), 10)
    cache, _, _ = kvjax.step(model, cache, np.arange(10, 19)[None], np.array([9]))

    def logits():
        return np.asarray(kvjax.step(model, cache, np.array([[19]]), np.array([1]))[1])

    before = logits()
    with sparse_attention(only_own):
        sparse = logits()
    assert seen == [0, 1]
    np.testing.assert_array_equal(logits(), before)
    assert seen == [0, 1] and np.max(np.abs(sparse - before)) > 1e-3


@pytest.mark.parametrize("budget", [0, -0.5, 1.5])
def test_a_budget_is_a_share(model, budget):
    with pytest.raises(ValueError, match=r"budget: got .*, wanted a share of the blocks in \(0, 1\]"):
        sparsity.follow(model, model.layer_specs(), needles(1), policy=sparsity.quest(), budget=budget)


def test_a_prompt_is_shorter_than_its_text(model):
    texts = needles(1)._replace(num_prompt=200)
    with pytest.raises(ValueError, match="num_prompt: got 200, wanted 1 to 124"):
        sparsity.follow(model, model.layer_specs(), texts)


def test_a_table_and_a_picture_have_a_line_for_each_policy(tmp_path):
    pytest.importorskip("matplotlib")
    made = [
        sparsity.Measurement(name, budget, 10.0 / budget, budget, 1.5, 2e6, 4e6)
        for name, budget in [("full", 1.0), *itertools.product(("a", "b"), (0.5, 0.25))]
    ]
    head, *lines = sparsity.table(made)
    assert head.split()[:3] == ["policy", "budget", "perplexity"] and len(lines) == 5
    assert lines[1].split() == ["a", "50%", "20.00", "50%", "1.50", "2.00", "4.00"]
    figure = sparsity.plot_study(made, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
    drawn = [[line.get_label() for line in ax.get_lines()] for ax in figure.axes]
    assert drawn[0] == ["a", "b", "full attention"] and len(drawn) == 2


class Words:
    """A tokenizer whose tokens are lengths of words, and a line's end is a 0."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        ids = [len(word) for word in text.replace("\n", " \n ").split(" ") if word != ""]
        return types.SimpleNamespace(ids=[0 if n == 1 else n for n in ids])


def test_needles_are_in_prompts_of_the_fillers_length():
    """Each at another depth, and then the question and the first token of its answer."""
    filler = np.arange(100, 140, dtype=np.int32)
    made = command._needles(Words(), filler, 3)
    assert made.num_prompt == 40 and made.tokens.shape == (3, 40 + 8)
    text = np.arange(100, 131).tolist()  # 40 + 8 tokens without a sentence of 9, and a question of 7 with an answer
    for tokens, depth, city, word in zip(made.tokens.tolist(), (5, 15, 25), (4, 4, 5), (5, 6, 6), strict=True):
        asked = [0, 3, 6, 4, 2, city, 2]  # The secret word of Oslo is
        assert tokens == [*text[:depth], *asked, word + 1, 0, *text[depth:], *asked, word]  # mango., mango
    with pytest.raises(ValueError, match="--prompt: got 9, wanted more than 9 tokens, for the needles"):
        command._needles(Words(), filler[:9], 3)


def only_first():
    return sparsity.SparsityPolicy(lambda scores, state: (scores.first(1) | scores.all & scores.is_prompt, state))


@pytest.mark.long
def test_the_command_measures_policies_by_name_and_of_ones_own(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_DOCUMENTS", 2)
    monkeypatch.setattr(command, "_FACTS", 12)
    options = ["--policies", "quest", f"{__name__}:only_first", "--budgets", "0.5", "--no-compile-cache"]
    command.main([*options, "--json", str(tmp_path / "lines.json"), "--plot", str(tmp_path / "plot.png")])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "policy",
        "full",
        "quest",
        "only_first",
    ]
    assert (tmp_path / "lines.json").exists() and (tmp_path / "plot.png").exists()
    with pytest.raises(SystemExit):
        command.main(["--policies", "nothing"])
    assert "--policies: got 'nothing', wanted one of streaming" in capsys.readouterr().err
