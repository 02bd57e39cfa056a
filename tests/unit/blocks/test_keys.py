# SPDX-License-Identifier: Apache-2.0
"""Keys depend on everything before the end of a block, and on nothing else; namespaces are interned."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax._arrays import mix
from kvjax.blocks import keys
from kvjax.blocks.keys import Namespaces, prefix_keys, root_key
from kvjax.state import Text

SIZE = 4


def test_the_example_in_the_docstring():
    assert doctest.testmod(keys).attempted == 2
    assert doctest.testmod(keys).failed == 0


def test_namespaces_tell_pairs_apart_and_remember_them():
    namespaces = Namespaces()
    pairs = [(None, None), ("", None), ("a", None), (None, 0), (None, 1), ("a", 0), ("a", 1)]
    numbers = [namespaces(*pair) for pair in pairs]
    assert numbers == list(range(len(pairs))) == [namespaces(salt=salt, lora=lora) for salt, lora in pairs]
    assert [namespaces.describe(number) for number in numbers] == pairs
    with pytest.raises(KeyError):
        namespaces.describe(len(pairs))


@functools.partial(jax.jit, static_argnames="with_extra")
def chain(namespace, tokens, extra_ids=None, fill=SIZE, *, with_extra=False):
    depth = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return prefix_keys(root_key(namespace), Text(tokens, extra_ids if with_extra else None), fill, depth)


def key_of(tokens, namespace=0, extra_ids=None):
    """The key of a whole prompt, as an int; its last block may be partly filled."""
    fill = np.full(-(-len(tokens) // SIZE), SIZE)
    fill[-1] = len(tokens) - (len(fill) - 1) * SIZE
    padded = lambda x: np.resize(np.append(x, [77] * SIZE), (len(fill), SIZE)).astype(np.int32)  # noqa: E731
    extra = None if extra_ids is None else padded(extra_ids)
    low, high = chain(jnp.int32(namespace), padded(tokens), extra, fill.astype(np.int32), with_extra=extra is not None)[
        -1
    ].tolist()
    return low | high << 32


def test_a_key_follows_from_its_parents():
    tokens = np.random.default_rng(0).integers(0, 1000, (6, SIZE)).astype(np.int32)
    at_once = chain(jnp.int32(3), tokens)
    key = root_key(jnp.int32(3))
    for depth in range(6):
        key = prefix_keys(key, Text(tokens[depth][None], None), SIZE, jnp.array([depth], jnp.int32))[0]
        np.testing.assert_array_equal(key, at_once[depth])


def test_whatever_differs_gives_another_key():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    swapped_blocks = [5, 6, 7, 8, 1, 2, 3, 4, 9]
    others = [
        prompt[:8], prompt[:4], [*prompt, 77], [*prompt, 0], prompt[::-1], swapped_blocks, [2, 1, *prompt[2:]],
        [*prompt[:8], 10], [0, *prompt[1:]], [1],
    ]  # fmt: skip
    seen = {key_of(prompt), key_of(prompt, namespace=1), key_of(prompt, namespace=2), *(map(key_of, others))}
    for extra in ([0] * 8 + [1], [1] + [0] * 8, [0] * 8 + [2]):
        seen.add(key_of(prompt, extra_ids=extra))
    assert len(seen) == 3 + len(others) + 3
    assert key_of(prompt) == key_of(prompt, extra_ids=[0] * 9)


def test_keys_of_many_prefixes_differ():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, (50_000, SIZE), dtype=np.int32)  # alike, as hard as it gets
    found = np.asarray(chain(jnp.int32(0), tokens))
    assert len(np.unique(found[:, 0])) > 49_900  # of 2**32, a few share a lane
    assert len(np.unique(found, axis=0)) == 50_000
    ones = np.unpackbits(found.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.01


def test_mix_is_a_bijection_that_moves_half_of_the_bits():
    words = np.arange(1 << 16, dtype=np.uint32) * np.uint32(65_521)
    mixed = np.asarray(mix(jnp.asarray(words)))
    assert len(np.unique(mixed)) == len(words)
    for bit in (0, 1, 15, 31):
        moved = mixed ^ np.asarray(mix(jnp.asarray(words ^ np.uint32(1 << bit))))
        assert abs(np.unpackbits(moved.view(np.uint8)).mean() - 0.5) < 0.01
