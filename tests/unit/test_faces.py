# SPDX-License-Identifier: Apache-2.0
"""`Cache` and `TieredCache` for their users: in an editor, as methods, and after a donation."""

import functools
import inspect

import jax
import numpy as np
import pytest

import kvjax
from kvjax._compile import OutermostJit
from kvjax.tiered import joined
from tests import cases, drive
from tests.oracle import draws

OPTIONS = {"num_blocks": 8, "max_seqs": 3, "max_length": 16, "block_size": 4, "dtype": "float32"}
SPEC = kvjax.make_spec([kvjax.LayerSpec(1, 2)], **OPTIONS)
TIERED = kvjax.make_spec([kvjax.LayerSpec(1, 2)], num_host_blocks=4, **OPTIONS)
OWN = ("adopt",)  # a method that takes bytes too
METHODS = (*(name for name, verb in cases.VERBS.items() if verb.calls and name not in OWN), *cases.VIEWS)


def ints(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(kvjax.Cache, name) for name in METHODS]
    + [(kvjax.tiers.TieredCache, name) for name in METHODS + cases.HOST_VERBS],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_method_shows_the_parameters_of_its_verb(owner, name):
    method, verb = map(inspect.signature, (getattr(owner, name), drive.verb(name)))
    _, *wanted = verb.parameters.values()
    self, *found = method.parameters.values()
    if owner is kvjax.tiers.TieredCache:  # it always uses both tiers
        wanted = [p.replace(default=("device", "host")) if p.name == "tiers" else p for p in wanted]
    assert self.name == "self" and found == wanted
    assert all(p.annotation != "Any" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in found)
    assert method.return_annotation == verb.return_annotation.replace("CacheState", "Self")
    assert getattr(owner, name).__doc__ == drive.verb(name).__doc__


def test_a_tiered_cache_has_every_name_of_a_cache():
    names = {name for name in dir(kvjax.Cache.create(SPEC)) if not name.startswith("_")}
    assert names >= {"state", "pools", "create", *METHODS}
    assert not names - set(dir(kvjax.tiers.TieredCache.create(TIERED)))


def test_both_kinds_of_caches_have_the_same_parts():
    for cache in (kvjax.Cache.create(SPEC), kvjax.tiers.TieredCache.create(TIERED)):
        assert cache.state is cache.cache.state and cache.pools is cache.cache.pools
        assert (cache.host is None) == (cache.cache is cache) == isinstance(cache, kvjax.Cache)
        assert joined(cache.cache, cache.host) == cache


TOKENS = np.arange(8, dtype=np.int32)


@pytest.mark.parametrize("verb", [name for name in METHODS if name not in ("admit", "extend", "lookup", *cases.VIEWS)])
def test_a_verb_of_a_tiered_cache_passes_its_arguments_on(verb):
    """The verbs are traced, not run. Two others order moves, which cannot be traced."""
    args, options = cases.CALLS[verb]
    tiered = kvjax.tiers.TieredCache.create(cases.SPECS["all of it"])

    def call(cache, host):
        after, events = getattr(kvjax.tiers.TieredCache(cache, host), verb)(*args, **options)
        return after.cache, after.host, events.status

    *after, status = jax.eval_shape(call, tiered.cache, tiered.host)
    before = jax.eval_shape(lambda *x: list(x), tiered.cache, tiered.host)
    assert jax.tree.flatten(after) == jax.tree.flatten(before)
    assert status.ndim == 1


class Traced(Exception):
    """A program was traced, and is not run."""


SAMPLES = {
    "tiers": ("device",), "reserve_tokens": 4, "alignment_tokens": 4, "max_tokens": 4, "max_removed": 2, "group": 0,
    "max_blocks": 3, "num_tokens": 2,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in METHODS + cases.HOST_VERBS if name not in cases.VIEWS])
def test_what_is_static_in_a_verb_is_static_in_its_method(name, monkeypatch):
    """The library jits the verbs of a `TieredCache`, so that it would trace a number that has to be an int."""

    def trace(self, *args, **options):
        self.eval_shape(*args, **options)
        raise Traced

    tiered = kvjax.tiers.TieredCache.create(cases.SPECS["all of it"])
    args, options = (cases.CALLS | cases.HOST_CALLS)[name]
    for jitted in ("__call__", "lower"):
        monkeypatch.setattr(OutermostJit, jitted, trace)
    parameters = inspect.signature(drive.verb(name)).parameters
    for option in (*drive.static(name), *(["num_tokens"] if {"num_tokens", "max_tokens"} <= {*parameters} else [])):
        sample = SAMPLES[option]
        for value in (sample, np.int64(sample) if isinstance(sample, int) else sample):
            with pytest.raises(Traced):
                getattr(tiered, name)(*args, **options | {option: value})
            if name not in cases.HOST_VERBS:
                given = options | {option: value}
                jax.eval_shape(lambda cache, given=given: getattr(cache, name)(*args, **given), tiered.cache)


@pytest.mark.long
@pytest.mark.parametrize("owner", [kvjax.Cache, pytest.param(kvjax.tiers.TieredCache, marks=pytest.mark.long)])
def test_verbs_and_methods_run_where_implicit_transfers_are_forbidden(owner):
    """Arguments are host data, and each eager operation has Python numbers in it."""
    with jax.transfer_guard("disallow"):
        spec = SPEC if owner is kvjax.Cache else TIERED
        cache, state = owner.create(spec), kvjax.init(spec)
        for verb, args, options in (("admit", (0, TOKENS, 8), {}), ("commit", (TOKENS[None], ints(8)), {"seqs": [0]})):
            cache, events = getattr(cache, verb)(*args, **options)
            state, of_state = getattr(kvjax, verb)(state, *args, **options)
            assert events.ok and of_state.ok and kvjax.to_list(events) == kvjax.to_list(of_state)
        assert int(cache.lookup(TOKENS, 8).cached_tokens) == 7 and cache.view(1).positions.shape == (3, 1)
        assert "active" in repr(cache)
        kvjax.check(cache.state)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError, match="Disallowed host-to-device"):
        kvjax.release(state, 0)  # as with jax' own explicit transfers


@pytest.mark.parametrize("jits", [False, True])
@pytest.mark.parametrize(("verb", "args"), [("admit", (0, TOKENS, 8)), ("extend", (np.array([True, False, False]),))])
def test_a_cache_that_makes_no_moves_refuses_the_host(verb, args, jits):
    """Its copies would overwrite the pool rows whose blocks are still to be moved."""
    method = functools.partial(getattr(kvjax.Cache, verb), tiers=("device", "host"))
    with pytest.raises(ValueError, match=r"^tiers: got \('device', 'host'\), wanted \('device',\): a Cache moves no b"):
        (jax.jit(method) if jits else method)(kvjax.Cache.create(TIERED), *args)


WIDE = 2**40 + 5
MODEL = jax.tree_util.Partial(lambda tokens, pools, view, *, last: (np.zeros((3, 5), np.float32), pools))


@pytest.mark.parametrize("face", draws.FACES)
@pytest.mark.parametrize("x64", [False, True])
def test_wide_numbers_are_refused_before_a_jit_cuts_them(face, x64):
    """2**40 + 5 must not be another image's 5."""
    with jax.enable_x64(x64):
        tiered = kvjax.tiers.TieredCache.create(cases.SPECS["all of it"])
        cache = {"state": tiered.state, "Cache": tiered.cache}.get(face, tiered)
        calls = cases.CALLS | cases.HOST_CALLS | draws.READS | {"step": ((MODEL, *cases.CALLS["commit"][0]), {})}
        if face != "state":
            del calls["adopt"]  # it takes bytes too
        found = list(draws.wide_calls(face, calls, tiered.state.spec, WIDE))
        assert len(found) > 50
        for verb, name, call in found:
            value = call.arguments[name]
            forms = (
                [value, value.tolist()] + [jax.numpy.asarray(value)] * x64 if isinstance(value, np.ndarray) else [value]
            )
            for call.arguments[name] in forms:
                error = draws.refusal(face, verb, cache, call)
                assert error.startswith(f"{name}: got "), (verb, name, error)


def delete(tree):
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


@pytest.mark.parametrize("create", [lambda: kvjax.Cache.create(SPEC), lambda: kvjax.tiers.TieredCache.create(TIERED)])
def test_a_donated_cache_says_so(create):
    calls = [("admit", (0, np.zeros(4, np.int32), 4)), ("release", (0,))]
    for part, reads in (("pools", []), ("state", [("view", (1,)), ("lookup", (ints(1, 2), 2))])):
        cache = create()
        delete(getattr(cache, part))
        for verb, args in calls + reads:
            with pytest.raises(ValueError, match=r"^cache: was donated to an earlier call: go on with the result"):
                getattr(cache, verb)(*args)
