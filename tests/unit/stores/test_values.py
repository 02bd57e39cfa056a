# SPDX-License-Identifier: Apache-2.0
"""The format of a stored block: what is encoded is decoded, and nothing else is; names have all that counts."""

import itertools

import numpy as np
import pytest

import kvjax
from kvjax import LayerSpec, Namespaces
from kvjax.blocks.hashes import namespace_root
from kvjax.interop.hashing import block_hash, root_hash
from kvjax.state import Text
from kvjax.stores.layout import leaves_of
from kvjax.stores.values import Values, size_of
from tests.unit.stores.kinds import KINDS, SIZE, make_spec

RNG = np.random.default_rng(0)


def arrays_of(spec, number):
    """Random arrays of a block."""
    leaves = leaves_of(spec, number)
    return [RNG.integers(0, 2**8, leaf.num_bytes, np.uint8).view(leaf.dtype).reshape(leaf.shape) for leaf in leaves]


def text_of(spec, num_tokens):
    return np.arange(1, 1 + num_tokens * (1 + spec.extra_ids), dtype="<i4").tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_any_kind_comes_back_with_zeros_after_its_tokens(kind):
    spec = make_spec(kind)
    values = Values(spec)
    for number, num_tokens in itertools.product(range(len(spec.groups)), (1, 3, SIZE)):
        text, arrays = text_of(spec, num_tokens), arrays_of(spec, number)
        block = values.block(root_hash(), text)
        value = b"".join(values.encode(block, number, arrays))
        assert len(value) == values.sizes[number] == size_of(values.name(block, number))
        words = values.decode(block, number, value)
        for leaf, array, decoded in zip(leaves_of(spec, number), arrays, words, strict=True):
            if leaf.axis is not None:
                np.moveaxis(array, leaf.axis, 0)[num_tokens:] = 0
            assert decoded.tobytes() == array.tobytes()
        for other in (values.block(root_hash(), text[:-1] + b"\1"), values.block(root_hash("another"), text)):
            assert values.decode(other, number, value) is None


def test_a_value_of_which_any_byte_differs_is_none():
    spec = make_spec("int8")
    values = Values(spec)
    block = values.block(root_hash(), text_of(spec, 3))
    good = b"".join(values.encode(block, 1, arrays_of(spec, 1)))
    for at in range(len(good)):
        changed = good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]
        assert values.decode(block, 1, changed) is None
    assert all(values.decode(block, 1, other) is None for other in (b"", good[:-1], good + b"\0"))
    assert values.decode(block, 0, good) is None and values.decode(block, 1, good) is not None


def test_hashes_are_those_of_the_wires():
    spec = make_spec("fp8")  # with extra ids
    tokens, extra_ids = np.arange(8), np.arange(8) % 3
    first, second = Values(spec).blocks(root_hash("m"), Text(tokens, extra_ids))
    assert first.hash == second.parent == block_hash(root_hash("m"), tokens[:4], extra_ids[:4])
    part = Values(spec).block(first.hash, np.array([4, 5, 1, 2], "<i4").tobytes())
    assert part.hash == block_hash(first.hash, [4, 5], [1, 2])


def test_a_name_has_all_that_the_bytes_depend_on():
    layers, options = [LayerSpec(2, 2)], {"num_blocks": 8, "max_seqs": 1, "max_length": 16, "block_size": SIZE}
    specs = [
        kvjax.make_spec(layers, **options | change)
        for change in ({}, {"dtype": "float16"}, {"dtype": "int8"}, {"extra_ids": True})
    ]
    others = [LayerSpec(1, 4)], [LayerSpec(2, 2, window=6)], layers * 2, [LayerSpec.latent(4, 2)]
    specs += [kvjax.make_spec(other, **options) for other in others]
    names, loras = Namespaces(), {0: "french", 5: "legal"}
    spaces = [names(), names("a"), names("b"), names("a", 0), names("a", 5), names(weights=1), names("a", weights=1)]
    roots = [namespace_root(space, names, loras, model, b"") for space in spaces for model in ("a model", "another")]
    found = [
        values.name(values.block(root, bytes(4 * SIZE)), 0)
        for root in roots
        for values in [*map(Values, specs), Values(specs[0], b"a key")]
    ]
    assert len(found) == len(set(found)) == len(roots) * (len(specs) + 1)
    bigger = kvjax.make_spec(layers, **options | {"num_blocks": 9, "max_seqs": 2, "max_length": 32, "retention": True})
    block = Values(specs[0]).block(roots[0], bytes(4 * SIZE))
    assert Values(bigger).name(block, 0) == Values(specs[0]).name(block, 0)
