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
from tests.drive import Driver

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
