# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding with the cache's verbs, as an example. The output is that of plain greedy decoding.

A small draft model guesses K tokens. The target computes them all at once: `extend` by K + 1, `commit` of those that
it would have chosen itself, `truncate` of the rest. Each model has its own cache.

A tree of guesses has a row for each branch: `fork` of the text for each, and one computation for all. The row of the
branch with the most right guesses stays, and the others are released.
"""

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder
from tests.drive import Driver, lines

K, NEW, MARGIN, BRANCHES, WIDEST = 3, 24, 2e-3, 3, 8
PROMPT = np.array([5, 3, 7, 1, 2, 9, 4], np.int32)


class Speaker(Driver):
    """A model with a cache of one row, whose text is exactly its committed tokens."""

    def __init__(self, layers, width, seed, alike=None, rows=1):
        config = ModelConfig("llama", 24, width, 2 * width, 4, (LayerConfig(2, 16),) * layers)
        self.model = Decoder(config, rngs=nnx.Rngs(seed))
        if alike is not None:  # its first layers, as a draft that is sometimes right
            for name in ("embed_tokens", "norm", "lm_head"):
                setattr(self.model, name, getattr(alike.model, name))
            self.model.layers = nnx.List([*alike.model.layers][:layers])
        spec = kvjax.make_spec(
            self.model.layer_specs(), num_blocks=24, max_seqs=rows, max_length=48, block_size=4, dtype="float32",
            partial_reuse=rows == 1,
        )  # fmt: skip
        super().__init__(kvjax.Cache.create(spec))
        self.compute = jax.jit(self._compute, static_argnames="width")

    @staticmethod
    def _compute(model, cache, tokens, count, width):
        logits, pools = model(tokens, cache.pools, cache.view(count, width))
        return logits, kvjax.Cache(cache.state, pools)

    def read(self, tokens):
        """Logits [T, V] after each of the next tokens, which are reserved but not committed."""
        tokens = np.asarray(tokens, np.int32)[None]
        count = np.array([tokens.shape[1]], np.int32)
        logits, self.cache = self.compute(self.model, self.cache, tokens, count, width=tokens.shape[1])
        return np.asarray(logits[0])

    def keep(self, tokens):
        """Commits tokens, and truncates the reserved slots after them."""
        assert self.write({0: tokens}) == ["OK"]
        self.do("truncate", 0, self.state.seqs.committed[0])

    def begin(self):
        """Reads the prompt; returns the logits after it."""
        assert self.admit(0, PROMPT) == ["OK"]
        logits = self.read(PROMPT)
        self.keep(PROMPT)
        return logits[-1]


def plain(speaker):
    """The tokens of plain decoding, and whether the choice of each was clear."""
    logits, text, clear = speaker.begin(), [], []
    for _ in range(NEW):
        second, best = np.partition(logits, -2)[-2:]
        text.append(int(np.argmax(logits)))
        clear.append(bool(best - second > MARGIN))
        assert speaker.grow(1) == ["OK"]
        logits = speaker.read(text[-1:])[-1]
        speaker.keep(text[-1:])
    return text, clear


def speculative(target, draft):
    """The tokens of speculative decoding, and the number of right guesses in each round."""
    text, right = [int(np.argmax(target.begin()))], []
    draft.begin()
    while len(text) < NEW:
        length, guesses = len(text), []
        behind = text[int(draft.state.seqs.committed[0]) - len(PROMPT) :]  # the tokens that the draft has not read yet
        for _ in range(K):
            assert draft.grow(len(behind)) == ["OK"]
            guesses.append(int(np.argmax(draft.read(behind)[-1])))
            draft.keep(behind)
            behind = guesses[-1:]
        tokens = [text[-1], *guesses]
        assert target.grow(len(tokens)) == ["OK"]
        chosen = np.argmax(target.read(tokens), axis=-1)
        accepted = int(np.sum(np.cumprod(chosen[:K] == guesses)))
        target.keep(tokens[: accepted + 1])
        text += [*guesses[:accepted], int(chosen[accepted])]
        right.append(accepted)
        # The draft keeps those of its guesses that the target accepted.
        read = min(length + accepted, int(draft.state.seqs.committed[0]) - len(PROMPT))
        draft.do("truncate", 0, len(PROMPT) + read)
    return text[:NEW], right


@pytest.mark.slow
def test_the_output_is_that_of_plain_greedy_decoding():
    alone, target = Speaker(3, 32, seed=0), Speaker(3, 32, seed=0)
    (wanted, clear), (got, right) = plain(alone), speculative(target, Speaker(2, 32, seed=1, alike=target))
    certain = clear.index(False) if False in clear else NEW
    assert certain > NEW // 2 and got[:certain] == wanted[:certain]
    assert 0 < sum(right) < K * len(right)  # some guesses were right, some were not
    seqs = target.state.seqs
    assert int(seqs.length[0]) == int(seqs.committed[0]) >= len(PROMPT) + NEW - 1


@pytest.mark.slow
def test_what_is_rejected_leaves_no_trace_in_the_index():
    """Only accepted tokens were ever committed, so the cache finds a text as after plain decoding."""
    alone, target = Speaker(3, 32, seed=0), Speaker(3, 32, seed=0)
    (wanted, _), (got, _) = plain(alone), speculative(target, Speaker(2, 32, seed=1, alike=target))
    length = min(i for i in range(NEW + 1) if wanted[:i] != got[:i]) - 1 if wanted != got else NEW - 1
    paths = []
    for speaker in (alone, target):
        found = {path for _, _, path in kvjax.events.index_of(speaker.state)}
        paths.append({path for path in found if len(path) <= len(PROMPT) + length})
    assert paths[0] == paths[1] and paths[0]


class Tree(Driver):
    """The rows of one text and its branches: the metadata of a tree of guesses.

    Without partial reuse, so that a dropped branch does not leave its copy of the text's last block in the cache.

    Attributes:
      row: the text's row between two rounds.
    """

    row = 0

    def branch(self, width):
        """Makes every row a branch, with `width` more tokens reserved."""
        for other in range(BRANCHES):
            if other != self.row:
                self.do("fork", self.row, other)
        self.reserve(range(BRANCHES), width)

    def reserve(self, rows, width):
        assert self.grow(*[width * (row in rows) for row in range(BRANCHES)]) == ["OK"] * BRANCHES

    def commit(self, tokens):
        """Commits tokens {row: list}."""
        assert self.write(tokens) == ["OK"] * BRANCHES

    def choose(self, row, length):
        """Continues this branch with so many tokens, and drops the other branches."""
        self.row = row
        self.do("truncate", row, length)
        for other in range(BRANCHES):
            if other != row:
                self.do("release", other)


def committed(driver):
    return np.asarray(driver.state.seqs.committed)


def check_tree(tree, text):
    """Asserts that one row holds just this text, in blocks of its own, and that no guess is left."""
    state = tree.state
    group, size = state.groups[0], state.spec.block_size
    assert np.asarray(state.seqs.length).tolist() == committed(tree).tolist()
    assert np.flatnonzero(committed(tree)).tolist() == [tree.row] and committed(tree)[tree.row] == len(text)
    held = -(-len(text) // size)
    refcount = np.asarray(group.blocks.refcount)
    assert refcount[np.asarray(group.table)[tree.row, :held]].tolist() == [1] * held and refcount.sum() == held
    assert int(group.num_empty) + held == refcount.size  # only the text is cached
    whole = {tuple(text[:end]) for end in range(size, len(text) + 1, size)}
    assert {path for _, _, path in kvjax.events.index_of(state)} == whole


@pytest.mark.slow
def test_branches_leave_behind_what_plain_decoding_does():
    """The rounds follow a given text. Any branch may win, with none to all of its guesses."""
    rng = np.random.default_rng(0)
    spec = kvjax.make_spec(num_blocks=16, max_seqs=BRANCHES, max_length=48, block_size=4, partial_reuse=False)
    tree = Tree(kvjax.init(spec))
    text = PROMPT.tolist()
    tree.start(0, text)
    while len(text) + K + 1 <= 48:
        whole, inside = divmod(len(text), 4)
        before = np.asarray(tree.state.groups[0].table)[tree.row, :whole]
        tree.branch(K + 1)
        copies = [event for event in kvjax.to_list(tree.events) if event["kind"] == "copied"]
        assert len(copies) == (BRANCHES - 1 if inside else 0)  # of a last block that is not full; one row keeps it
        assert np.asarray(tree.state.groups[0].blocks.refcount)[before].tolist() == [BRANCHES] * whole
        winner, tokens = int(rng.integers(BRANCHES)), rng.integers(0, 24, int(rng.integers(1, K + 2))).tolist()
        text += tokens
        tree.commit({winner: tokens})
        tree.choose(winner, len(text))
        check_tree(tree, text)


class Grove(Tree):
    """A tree with the model of a `Speaker`."""

    def __init__(self, layers, **options):
        speaker = Speaker(layers, 32, rows=BRANCHES, **options)
        super().__init__(speaker.cache)
        self.model, self.compute = speaker.model, speaker.compute

    def read(self, tokens):
        """Logits [BRANCHES, WIDEST, V] after each of the next tokens {row: list}, which are reserved."""
        logits, self.cache = self.compute(self.model, self.cache, *lines(tokens, BRANCHES, WIDEST), width=WIDEST)
        return np.asarray(logits)

    def tell(self, tokens):
        """Reads and commits tokens {row: list}; returns {row: logits [V] after its last one}."""
        logits = self.read(tokens)
        self.commit(tokens)
        return {row: logits[row, len(new) - 1] for row, new in tokens.items()}


def guess(draft, text):
    """BRANCHES lists of K guesses after a text: the likeliest tokens, and the draft's choices after each."""
    behind = text[committed(draft.cache)[draft.row] :]
    draft.reserve([draft.row], len(behind))
    logits = draft.tell({draft.row: behind})[draft.row]
    guesses = [[int(token)] for token in np.argsort(-logits)[:BRANCHES]]
    draft.branch(K - 1)
    for _ in range(K - 1):
        for row, logits in draft.tell({row: line[-1:] for row, line in enumerate(guesses)}).items():
            guesses[row].append(int(np.argmax(logits)))
    return guesses


def tree_speculative(target, draft):
    """The tokens, and each round's winning branch and its number of right guesses."""
    assert target.admit(0, PROMPT) == draft.admit(0, PROMPT[:-1]) == ["OK"]
    draft.tell({0: PROMPT[:-1].tolist()})
    text, rounds = PROMPT.tolist(), []
    text.append(int(np.argmax(target.tell({0: text})[0])))
    while len(text) < len(PROMPT) + NEW:
        guesses = guess(draft, text)
        target.branch(K + 1)
        chosen = np.argmax(target.read({row: [text[-1], *line] for row, line in enumerate(guesses)}), axis=-1)
        right = [int(np.sum(np.cumprod(chosen[row, :K] == line))) for row, line in enumerate(guesses)]
        winner = int(np.argmax(right))
        new = guesses[winner][: right[winner]]
        target.commit({winner: [text[-1], *new]})
        target.choose(winner, len(text) + len(new))
        draft.choose(winner, len(text) + min(len(new), K - 1))
        text += [*new, int(chosen[winner, len(new)])]
        check_tree(target, text[:-1])
        rounds.append((winner, len(new)))
    return text[len(PROMPT) :][:NEW], rounds


@pytest.mark.slow
def test_the_best_branch_of_a_tree_is_what_plain_greedy_decoding_says():
    target = Grove(3, seed=0)
    (wanted, clear), (got, rounds) = (
        plain(Speaker(3, 32, seed=0)),
        tree_speculative(target, Grove(2, seed=1, alike=target)),
    )
    certain = clear.index(False) if False in clear else NEW
    assert certain > NEW // 2 and got[:certain] == wanted[:certain]
    assert {winner for winner, right in rounds if right} > {0}  # sometimes another branch than the first won
    assert {right for _, right in rounds} >= {0, K}, rounds
