# SPDX-License-Identifier: Apache-2.0
"""Generation with the `Namespaces` that numbered its tenants: it refuses the numbers of any other."""

import jax
import jax.numpy as jnp
import pytest

import kvjax

OPTIONS = {"num_blocks": 16, "max_seqs": 2, "max_length": 24, "block_size": 4, "dtype": "float32"}
SPEC = kvjax.make_spec([kvjax.LayerSpec(1, 4)], **OPTIONS)
TIERED = kvjax.make_spec([kvjax.LayerSpec(1, 4)], num_host_blocks=4, **OPTIONS)
PROMPT = list(range(11))


def even(tokens, pools, view, *, last):
    """Logits that depend on nothing."""
    return jnp.zeros((*last.shape, 61)), pools


MODEL = jax.tree_util.Partial(even)


def streamed(*args, **options):
    return list(kvjax.stream(*args, **options))


@pytest.mark.parametrize("use", [kvjax.generate, streamed])
@pytest.mark.parametrize("create", [lambda: kvjax.Cache.create(SPEC), lambda: kvjax.tiers.TieredCache.create(TIERED)])
def test_numbers_that_names_never_gave_out_are_refused_before_anything_is_donated(use, create):
    cache, names = create(), kvjax.Namespaces()
    names("tenant a")
    for namespaces, got in (([2], 2), ([-1], -1)):
        with pytest.raises(
            ValueError, match=rf"^namespaces: got {got} for prompt 0, wanted one that names gave out, 0"
        ):
            use(MODEL, cache, [PROMPT], namespaces=namespaces, names=names)
    with pytest.raises(ValueError, match=r"^namespaces: got 2 for prompt 1, .* 0\.\.1; a saved cache needs the names"):
        use(MODEL, cache, [PROMPT, PROMPT], namespaces=[1, 2], names=names)
    for wrong in ({"version": 1}, 3, names.to_dict()):
        with pytest.raises(ValueError, match=r"^names: got .*, wanted a kvjax\.Namespaces or None"):
            use(MODEL, cache, [PROMPT], names=wrong)
    kvjax.check(cache.state)
    assert "donated" not in repr(cache)


@pytest.mark.long
def test_tenants_find_their_own_prompts():
    cache, names = kvjax.Cache.create(SPEC), kvjax.Namespaces()
    spaces = [names("tenant a"), names("tenant b"), names("tenant a")]
    cached = []
    for space in spaces:
        outputs, cache, _ = kvjax.generate(MODEL, cache, [PROMPT], max_new_tokens=1, namespaces=[space], names=names)
        cached.append(outputs[0].cached_tokens)
    *_, last = kvjax.stream(MODEL, cache, [PROMPT], max_new_tokens=1, names=names)
    cached.append(last.outputs[0].cached_tokens)
    assert cached == [0, 0, 10, 0]
