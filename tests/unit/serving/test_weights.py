# SPDX-License-Identifier: Apache-2.0
"""Other weights over the same cache are refused, where the host knows the cache."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import stores
from kvjax.serving import Replicas, RunOptions
from kvjax.serving.weights import Weights, _known, check_weights, known, remember
from tests import drive
from tests.serving_kit import BASE, MODEL, NEW, OPTIONS, ask, make_cache, make_spec

OTHER = MODEL.replace(head=MODEL.head * 2)
PROMPT = [1, 2, 3, 4, 5]
REFUSED = (
    r"^model: got other arrays than computed namespace 0 of this cache, .* kvjax.reset .* or the option reuse='any'"
)


def generate(model, cache, **options):
    return kvjax.generate(model, cache, [PROMPT], **OPTIONS, **options)


@pytest.mark.long
def test_new_weights_over_an_old_cache_are_refused_before_anything_is_donated():
    _, cache, _ = generate(MODEL, make_cache())
    with pytest.raises(ValueError, match=REFUSED):
        generate(OTHER, cache)
    again, cache, _ = generate(MODEL.replace(), cache)  # the same arrays in another object
    assert again[0].cached_tokens == 4
    _, cache, _ = generate(OTHER, cache, namespace=1)
    for model, namespace in ((MODEL, 1), (OTHER, 0)):
        with pytest.raises(ValueError, match=REFUSED.replace("namespace 0", f"namespace {namespace}")):
            generate(model, cache, namespace=namespace)
    with pytest.raises(ValueError, match=REFUSED), drive.engine(OTHER, cache, **BASE) as engine:
        engine.submit(kvjax.serving.Request(PROMPT, max_new_tokens=NEW))


def test_a_cache_that_was_reset_or_changed_elsewhere_is_unknown():
    _, cache, _ = generate(MODEL, make_cache())
    changed = cache.replace(state=jax.jit(lambda state: state)(cache.state))
    assert known(cache.state) and not known(changed.state)
    empty, _ = kvjax.reset(cache.state)
    assert not known(empty)
    generate(OTHER, cache.replace(state=empty))


def test_reuse_of_any_is_allowed():
    _, cache, _ = generate(MODEL, make_cache())
    (output,), _, _ = generate(OTHER, cache, reuse="any")
    assert output.cached_tokens == 4
    with pytest.raises(ValueError, match=r"^reuse: got 'all', wanted 'same weights' or 'any'"):
        generate(MODEL, make_cache(), reuse="all")


@pytest.mark.long
def test_replicas_know_the_weights_of_their_caches():
    replicas = Replicas(MODEL, make_spec(), jax.devices()[:1])
    for cached in (0, 4):
        (output,) = replicas.run_batch([ask(PROMPT)], RunOptions(**BASE))
        assert output.cached_tokens == cached
    (cache,) = replicas.caches
    with pytest.raises(ValueError, match=REFUSED):
        generate(OTHER, cache)
    replicas._replicas[0].model = jax.device_put(OTHER, jax.devices()[0])  # weights updated in place
    with pytest.raises(ValueError, match=REFUSED):
        replicas.run_batch([ask(PROMPT)], RunOptions(**BASE))
    assert replicas.run_batch([ask(PROMPT, namespace=1)], RunOptions(**BASE))[0].cached_tokens == 0


@pytest.mark.long
def test_after_a_load_the_name_of_the_model_in_the_save_counts(tmp_path):
    """The arrays of another process are always others."""
    _, cache, _ = generate(MODEL, make_cache())
    stores.save(cache, tmp_path, model="toy 1")
    with pytest.raises(ValueError, match=r"^model: got 'toy 2', wanted that of the save, 'toy 1'"):
        stores.load(make_cache(), tmp_path, model="toy 2")
    cache, _ = stores.load(make_cache(), tmp_path, model="toy 1")
    assert not known(cache.state)
    same = jax.tree.map(jnp.copy, MODEL)
    (output,), cache, _ = generate(same, cache)
    assert output.cached_tokens == 4
    with pytest.raises(ValueError, match=REFUSED):
        generate(OTHER, cache)


def test_weights_are_known_by_identity_and_kept_alive_by_nobody():
    arrays = {"w": jnp.ones(3), "b": np.ones(2), "n": 3}
    weights = Weights(arrays)
    assert weights.are_of(dict(arrays)) and not weights.are_of(arrays | {"w": jnp.ones(3)})
    assert not weights.are_of(arrays | {"n": 4}) and not weights.are_of({"w": arrays["w"]})
    state = kvjax.init(kvjax.make_spec(num_blocks=4, max_seqs=1, max_length=8, block_size=4))
    remember(state, {2: weights})
    key = id(state.groups[0].blocks.fill)
    assert key in _known
    check_weights(arrays, known(state), [2, 5])
    del state
    gc.collect()
    assert key not in _known
