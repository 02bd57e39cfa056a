# SPDX-License-Identifier: Apache-2.0
"""Keys depend on all tokens up to a block's end, and on nothing else; namespaces are interned, and saved."""

import functools
import io
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._arrays import mix
from kvjax.blocks import keys
from kvjax.blocks.keys import Namespaces, prefix_keys, root_key
from kvjax.state import Text
from tests.drive import PLAIN, Driver, padded

SIZE = 4


def test_namespaces_tell_pairs_apart_and_remember_them():
    namespaces = Namespaces()
    pairs = [(None, None), ("", None), ("a", None), (None, 0), (None, 1), ("a", 0), ("a", 1)]
    numbers = [namespaces(*pair) for pair in pairs]
    assert numbers == list(range(len(pairs))) == [namespaces(salt=salt, lora=lora) for salt, lora in pairs]
    assert [namespaces.describe(number) for number in numbers] == pairs
    for unknown in (len(pairs), -1):
        assert unknown not in namespaces
        with pytest.raises(KeyError):
            namespaces.describe(unknown)
    assert len(namespaces) == len(pairs) and all(number in namespaces for number in numbers)
    assert namespaces(lora=np.int32(1)) == numbers[4] and "1" not in namespaces


def test_a_pair_is_text_and_an_integer():
    namespaces = Namespaces()
    for salt in (b"a", 1, ("a",)):
        with pytest.raises(ValueError, match=r"^salt: got .*, wanted a str or None"):
            namespaces(salt)
    for lora in ("sql", 1.0, True):
        with pytest.raises(ValueError, match=r"^lora: got .*, wanted an int or None"):
            namespaces(lora=lora)
    assert len(namespaces) == 1


def test_versions_of_weights_are_namespaces_that_no_salt_can_name():
    names = Namespaces()
    salts, versions = (None, "", "a", "7", ":a"), (None, 0, 1, 17, "", "7:a", "a")
    numbers = [names(salt, lora, weights=weights) for salt in salts for lora in (None, 0) for weights in versions]
    assert numbers == list(range(len(numbers)))
    assert names(weights=np.int32(17)) == names(weights="17") == names(weights=17)
    salt, _ = names.describe(names("a", weights=1))
    assert salt == Namespaces.salted("a", 1) and "a" in salt
    with pytest.raises(ValueError, match=r"salt: got .*, wanted a salt that does not begin with 'kvjax-weights:'"):
        names(salt)
    for weights in (1.5, True, b"a"):
        with pytest.raises(ValueError, match=r"^weights: got .*, wanted a str, an int or None"):
            names(weights=weights)
    again = Namespaces.from_dict(json.loads(json.dumps(names.to_dict())))
    assert again("a", weights=1) == names("a", weights=1) and len(again) == len(names)


def saved_namespaces():
    namespaces = Namespaces()
    for pair in (("a", None), ("", 0), (None, np.int64(7)), ("\u00e4\ud800", -1)):
        namespaces(*pair)
    return namespaces


def test_numbers_read_back_are_the_same_pairs_for_ever():
    names = saved_namespaces()
    saved = json.loads(json.dumps(names.to_dict()))
    again = Namespaces.from_dict(saved)
    assert [again.describe(n) for n in range(len(again))] == [names.describe(n) for n in range(len(names))]
    assert [again(*names.describe(n)) for n in range(5)] == list(range(5))
    assert again("b") == 5 and again.to_dict() != saved and len(names) == 5
    assert Namespaces.from_dict(again.to_dict()).to_dict() == again.to_dict()
    assert Namespaces.from_dict(Namespaces().to_dict())("first") == 1


def test_a_save_of_version_1_is_read():
    again = Namespaces.from_dict({"version": 1, "namespaces": [[0, None, None], [1, "a", 3]]})
    assert again("a", 3) == 1 and again("b") == 2


def test_a_lent_number_ends_with_its_last_borrower_and_is_never_given_out_again():
    names = Namespaces()
    first, second, other = names.lend("a"), names.lend("a"), names.lend("b")
    assert first == second != other == names("b")
    names.give_back(first)
    assert names.describe(first) == ("a", None)
    names.give_back(first)
    names.give_back(other)  # which a call has given out, so that it stays
    names.give_back(other)
    assert first not in names and len(names) == 2 and names.describe(other) == ("b", None)
    with pytest.raises(KeyError):
        names.describe(first)
    assert names.lend("b") == other and names.lend("a") == 3
    names.give_back(3)
    again = pickle.loads(pickle.dumps(names))
    for restored in (Namespaces.from_dict(json.loads(json.dumps(names.to_dict()))), again):
        assert len(restored) == 2 and restored("b") == other and restored("c") == 4
    with pytest.raises(ValueError, match=r"^salt: got .*, wanted a salt that does not begin with 'kvjax-weights:'"):
        names.lend(Namespaces.salted("a", 1))


def test_numbers_end_at_those_of_an_i32():
    names = Namespaces.from_dict({"version": 2, "namespaces": [[0, None, None]], "next": 2**31 - 1})
    assert names("a") == 2**31 - 1 == names("a")
    with pytest.raises(RuntimeError, match=r"^all 2,147,483,648 numbers of namespaces are in use or were used"):
        names("b")
    assert Namespaces.from_dict(names.to_dict())("a") == 2**31 - 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ([], r"got \[\], wanted the result of Namespaces.to_dict"),
        ({"more": 1}, r"got \{.*\}, wanted the result of Namespaces.to_dict"),
        ({"version": 3}, "got version 3, wanted 2 with next, or 1 without"),
        ({"version": 1}, "got version 1, wanted 2 with next"),
        ({"version": True}, "got version True, wanted 2 with next"),
        ({"version": None}, "got version None, wanted 2"),
        ({"next": 0}, "got next 0, wanted an i32 above all numbers"),
        ({"next": True}, "got next True, wanted an i32 above all numbers"),
        ({"next": 2**31 + 1}, "got next 2147483649, wanted an i32 above all numbers"),
        ({"namespaces": []}, r"got namespaces \[\], wanted a list of \[number, salt, LoRA\]"),
        ({"namespaces": {"0": [None, None]}}, "got namespaces .*, wanted a list"),
        ({"namespaces": [[0, None]]}, "got namespaces .*, wanted a list"),
        ({"namespaces": ["abc"]}, "got namespaces .*, wanted a list"),
        ({"namespaces": [[0, "a", None]]}, r"got \[0, 'a', None\], wanted number 0 with \(None, None\)$"),
        ({"namespaces": [[1, None, None]]}, r"got \[1, None, None\], wanted number 0"),
        ({"namespaces": [[False, None, None]]}, r"got \[False, None, None\], wanted number 0"),
        (
            {"namespaces": [[0, None, None], [2**31, "a", None]]},
            r"got \[2147483648, 'a', None\], wanted a number from 1",
        ),
        ({"namespaces": [[0, None, None], [True, "a", None]]}, r"got \[True, 'a', None\], wanted a number from 1"),
        ({"namespaces": [[0, None, None], [0, "a", None]]}, r"got \[0, 'a', None\], wanted a number from 1"),
        ({"namespaces": [[0, None, None], [1, None, None]]}, r"got \[1, None, None\], wanted a number from 1"),
        (
            {"namespaces": [[0, None, None], [1, "a", 3], [2, "a", 3]]},
            r"got \[2, 'a', 3\], wanted a number from 2 with a pair that no other number has$",
        ),
    ],
)
def test_what_cannot_have_been_saved_is_refused(changes, complaint):
    saved = {**Namespaces().to_dict(), **changes} if isinstance(changes, dict) else changes
    with pytest.raises(ValueError, match=f"^saved: {complaint}"):
        Namespaces.from_dict(saved)
    with pytest.raises(ValueError, match=r"^lora: got '3', wanted an int"):
        Namespaces.from_dict({"version": 1, "namespaces": [[0, None, None], [1, "a", "3"]]})


def test_after_a_restart_a_tenant_finds_nothing_of_another():
    """A bug: tenant b came first to a new `Namespaces`, and got the number of a's cached tokens."""
    names, text = Namespaces(), list(range(11))
    cache = Driver(kvjax.init(PLAIN))
    cache.start(0, text, namespace=names(salt="tenant a"))
    cache.do("release", 0)
    arrays = io.BytesIO()
    np.savez(arrays, *jax.tree.leaves(cache.state))
    saved, pickled = json.dumps(names.to_dict()), pickle.dumps(cache.state)
    del names

    arrays.seek(0)
    loaded = map(jnp.asarray, np.load(arrays).values())
    restored = jax.tree.unflatten(jax.tree.structure(kvjax.init(PLAIN)), loaded)
    unpickled = pickle.loads(pickled)
    assert jax.tree.structure(unpickled) == jax.tree.structure(restored)
    for state in (restored, unpickled):
        kvjax.check(state)

        def found(names, salt, state=state):
            tokens, namespace = padded(text, PLAIN.max_length + 1), np.int32(names(salt=salt))
            return int(cache.verbs["lookup"](state, tokens, np.int32(11), namespace=namespace).cached_tokens)

        assert found(Namespaces(), "tenant b") == 10
        assert found(Namespaces.from_dict(json.loads(saved)), "tenant b") == 0
        assert found(Namespaces.from_dict(json.loads(saved)), "tenant a") == 10


@functools.partial(jax.jit, static_argnames="with_extra")
def chain(namespace, tokens, extra_ids=None, fill=SIZE, *, with_extra=False):
    depth = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    text = Text(tokens, extra_ids if with_extra else None)
    return prefix_keys(root_key(namespace)[None], text, fill, depth, keys.chain)


def key_of(tokens, namespace=0, extra_ids=None):
    """The key of a whole prompt, as an int. Its last block may be partly filled."""
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
        key = prefix_keys(key, Text(tokens[depth], None), SIZE, jnp.int32(depth))
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
