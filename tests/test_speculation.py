# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative decoding with the cache's verbs, as an example: the output is that of plain greedy decoding.

A small draft model guesses K tokens. The target computes them all at once: `extend` by K + 1, `commit` of those that
it would have chosen itself, `truncate` of the rest. Both models have a cache of their own.
"""

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from models.config import LayerConfig, ModelConfig
from models.decoder import Decoder

K, NEW, MARGIN = 3, 24, 2e-3
PROMPT = np.array([5, 3, 7, 1, 2, 9, 4], np.int32)

pytestmark = [pytest.mark.slow]


class Speaker:
    """A model with a cache of one row, whose text is all that is committed."""

    def __init__(self, layers, width, seed, alike=None):
        config = ModelConfig("llama", 24, width, 2 * width, 4, (LayerConfig(2, 16),) * layers)
        self.model = Decoder(config, rngs=nnx.Rngs(seed))
        if alike is not None:  # its first layers: a draft that is right now and then
            for name in ("embed_tokens", "norm", "lm_head"):
                setattr(self.model, name, getattr(alike.model, name))
            self.model.layers = nnx.List([*alike.model.layers][:layers])
        spec = kvjax.make_spec(
            self.model.layer_specs(), num_blocks=16, max_seqs=1, max_length=48, block_size=4, dtype="float32"
        )
        self.cache = kvjax.Cache.create(spec)
        self.compute = jax.jit(self._compute, static_argnames="width")
        self.extend = jax.jit(kvjax.Cache.extend, static_argnames="max_tokens")
        self.commit, self.truncate = jax.jit(kvjax.Cache.commit), jax.jit(kvjax.Cache.truncate)

    @staticmethod
    def _compute(model, cache, tokens, count, width):
        logits, pools = model(tokens, cache.pools, cache.view(count, width))
        return logits[0], kvjax.Cache(cache.state, pools)

    def read(self, tokens):
        """Logits [T, V] after each of the next tokens, which have room but are not committed."""
        tokens = np.asarray(tokens, np.int32)[None]
        count = np.array([tokens.shape[1]], np.int32)
        logits, self.cache = self.compute(self.model, self.cache, tokens, count, width=tokens.shape[1])
        return np.asarray(logits)

    def keep(self, tokens):
        """Commits tokens and gives up what room there is beyond them."""
        tokens = np.asarray(tokens, np.int32)[None]
        self.cache, events = self.commit(self.cache, tokens, np.array([tokens.shape[1]], np.int32))
        assert events.ok
        self.cache, events = self.truncate(self.cache, np.int32(0), self.cache.state.seqs.committed[0])
        assert events.ok
        kvjax.check(self.cache.state)

    def room(self, count):
        self.cache, events = self.extend(self.cache, np.array([True]), np.array([count], np.int32), max_tokens=K + 1)
        assert events.ok

    def begin(self):
        """Reads the prompt; the logits after it."""
        self.cache, events = self.cache.admit(0, PROMPT, len(PROMPT))
        assert events.ok
        logits = self.read(PROMPT)
        self.keep(PROMPT)
        return logits[-1]


def plain(speaker):
    """Tokens, and whether the choice of each was clear."""
    logits, text, clear = speaker.begin(), [], []
    for _ in range(NEW):
        second, best = np.partition(logits, -2)[-2:]
        text.append(int(np.argmax(logits)))
        clear.append(bool(best - second > MARGIN))
        speaker.room(1)
        logits = speaker.read(text[-1:])[-1]
        speaker.keep(text[-1:])
    return text, clear


def speculative(target, draft):
    """Tokens, and how many of the draft's guesses were right in each round."""
    text, right = [int(np.argmax(target.begin()))], []
    draft.begin()
    while len(text) < NEW:
        known, guesses = len(text), []
        behind = text[int(draft.cache.state.seqs.committed[0]) - len(PROMPT) :]  # what the draft has not read yet
        for _ in range(K):
            draft.room(len(behind))
            guesses.append(int(np.argmax(draft.read(behind)[-1])))
            draft.keep(behind)
            behind = guesses[-1:]
        asked = [text[-1], *guesses]
        target.room(len(asked))
        chosen = np.argmax(target.read(asked), axis=-1)
        accepted = int(np.sum(np.cumprod(chosen[:K] == guesses)))
        target.keep(asked[: accepted + 1])
        text += [*guesses[:accepted], int(chosen[accepted])]
        right.append(accepted)
        # Of its own guesses the draft keeps what the target took.
        read = min(known + accepted, int(draft.cache.state.seqs.committed[0]) - len(PROMPT))
        draft.cache, events = draft.truncate(draft.cache, np.int32(0), np.int32(len(PROMPT) + read))
        assert events.ok
    return text[:NEW], right


def test_the_output_is_that_of_plain_greedy_decoding():
    alone, target = Speaker(3, 32, seed=0), Speaker(3, 32, seed=0)
    (wanted, clear), (got, right) = plain(alone), speculative(target, Speaker(2, 32, seed=1, alike=target))
    certain = clear.index(False) if False in clear else NEW
    assert certain > NEW // 2 and got[:certain] == wanted[:certain]
    assert 0 < sum(right) < K * len(right)  # some guesses were right, some were not
    seqs = target.cache.state.seqs
    assert int(seqs.length[0]) == int(seqs.committed[0]) >= len(PROMPT) + NEW - 1


def test_what_is_rejected_leaves_no_trace_in_the_index():
    """Only accepted tokens were ever committed, so the cache finds a text exactly as after plain decoding."""
    alone, target = Speaker(3, 32, seed=0), Speaker(3, 32, seed=0)
    (wanted, _), (got, _) = plain(alone), speculative(target, Speaker(2, 32, seed=1, alike=target))
    length = min(i for i in range(NEW + 1) if wanted[:i] != got[:i]) - 1 if wanted != got else NEW - 1
    paths = []
    for speaker in (alone, target):
        found = {path for _, _, path in kvjax.index_of(speaker.cache.state)}
        paths.append({path for path in found if len(path) <= len(PROMPT) + length})
    assert paths[0] == paths[1] and paths[0]
