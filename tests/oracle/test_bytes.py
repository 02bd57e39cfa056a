# SPDX-License-Identifier: Apache-2.0
"""Every byte that may be read is right after every step of random histories (`bytes_machine.py`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.stores
from kvjax import Cache
from kvjax.blocks import holes
from kvjax.pools import recurrent, stage
from tests.oracle import bytes_machine, draws
from tests.oracle.bytes_machine import CONFIGS, SIZE, carry_out, live

NIGHTLY = 20_000  # steps, of all configurations together
SLOW = [name for name, config in CONFIGS.items() if config.generate and config.verbs is None]
HAPPENS = (
    "hit", "partial hit", "copied on write", "fork", "truncate", "merged", "stored", "removed", "NO_BLOCKS",
    "decode", "trim", "block given back",
)  # fmt: skip
OF_VERSIONS = "rows of old weights", "cached by other weights"
ADOPTED = "adopted", "landed", "dropped", "published meanwhile", "adoption refused"
PARKED = "parked", "refused to park", "over after parking"
MISUSED = "refused in a step", "refused numbers"
ON_HOSTS = ("offloaded", "onboarded", "copied from the host", "took over", "failed", "lost", "dropped by the host")


@pytest.fixture(autouse=True, scope="module")
def quick_compiler():
    """Compiles with little optimisation: programs run for microseconds and take seconds to compile."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_the_machine_gives_every_argument_of_every_face():
    assert draws.undrawn(draws.listed()) == []


@pytest.mark.slow
def test_the_list_of_given_arguments_is_true():
    life = live(CONFIGS["every argument"], seed=7, steps=1_500)
    assert life.arguments == draws.listed()
    assert_happened(life.tally, "hit", *ADOPTED, *MISUSED)


def assert_happened(tally, *things):
    rare = [thing for thing in things if not tally[thing]]
    assert not rare, f"never happened: {rare} in {dict(tally)}"


FAST, ADOPTING = CONFIGS["fast host"], ("adopt", "reserve", "deliver", "finish_adoption")
WITHOUT = dataclasses.replace(FAST, verbs=tuple(verb for verb in FAST.verbs if verb not in ADOPTING))


@pytest.mark.parametrize(
    ("config", "seed"),
    [pytest.param(FAST, 4, marks=pytest.mark.long), pytest.param(WITHOUT, 7, marks=pytest.mark.slow)],
)
def test_bytes_over_two_tiers(config, seed):
    life = live(config, seed=seed, steps=500)
    assert_happened(life.tally, *HAPPENS, *ON_HOSTS, *OF_VERSIONS, *MISUSED)
    if config is FAST:
        assert_happened(life.tally, *ADOPTED, "failed in adopt", "failed in reserve")
    demand, _ = life.demands()[0]
    for tier, rows in enumerate(np.split(demand, [life.spec.groups[0].num_blocks])):
        row, slot = np.argwhere(rows >= 0)[0]
        life.bytes[tier].arrays[0][0][row, 1, 1, 0, slot] += 1  # one V of the second layer
        with pytest.raises(AssertionError, match=f"{('device', 'host')[tier]} row .* is read by"):
            life.verify()
        life.bytes[tier].arrays[0][0][row, 1, 1, 0, slot] -= 1


def call(verb, **request):
    return {"verb": verb, "poison": True, "defer": False, "fault": None, **request}


def served(*prompts, namespace=0, **request):
    """Requests that admit prompts together, compute them, and release them."""
    seqs, rows = list(range(len(prompts))), np.zeros((3, 16), int).tolist()
    pad = [-1] * (2 - len(prompts))
    prompts = [*prompts, *[[0]] * len(pad)]
    return [
        call("admit", seqs=seqs + pad, prompts=prompts, namespaces=[namespace] * 2, wide=True, **request),
        call("commit", num_tokens=[16] * 3, tokens=rows),
        call("release", seqs=seqs + pad),
    ]


@pytest.mark.long
def test_a_copy_from_the_host_that_failed_is_not_stored_when_its_row_is_released():
    """The tail of the failed move is in no index yet, so that the failure took nothing out of one."""
    history = served([0, 1, 2, 0, 1], namespace=1) + served([0] * 16, [1] * 12)
    life = carry_out(CONFIGS["fast host"], lambda _: [*history, served([0, 1, 1], namespace=1, fault=0)[0]])
    assert_happened(life.tally, "copied from the host", "failed", "lost")


def forgetful(monkeypatch):
    """A view of the first uncommitted tokens, in every step."""
    monkeypatch.setattr(Cache, "view", lambda cache, count, width, written: kvjax.view(cache.state, count, width))


def greedy(monkeypatch):
    """A `trim` that takes one block more."""
    trim = Cache.trim

    def wrong(cache, active, *, max_tokens):
        seqs = cache.state.seqs
        less = cache.state.replace(seqs=seqs.replace(committed=jnp.maximum(seqs.committed - SIZE, 1)))
        cache, events = trim(cache.replace(state=less), active, max_tokens=max_tokens + SIZE)
        return cache.replace(state=cache.state.replace(seqs=seqs.replace(length=seqs.committed))), events

    monkeypatch.setattr(Cache, "trim", wrong)


def boastful(monkeypatch):
    """A `commit` of one token more than was written, where a slot is reserved."""
    commit = Cache.commit

    def wrong(cache, tokens, counts, **options):
        seqs = cache.state.seqs
        return commit(cache, tokens, jnp.minimum(counts + 1, seqs.length - seqs.committed), **options)

    monkeypatch.setattr(Cache, "commit", wrong)


def assert_noticed(config, history, mistake, noticed, monkeypatch):
    """Carries out a history, which fails as `noticed` says with a mistake, in programs that are traced anew."""
    if mistake is None:
        assert_happened(carry_out(config, lambda _: history).tally, *noticed)
        return
    mistake(monkeypatch)
    functions = {
        "decode": bytes_machine.block_of_steps, "adopt": kvjax.stores.adopt,
        "finish_adoption": kvjax.stores.finish_adoption, "scatter": bytes_machine.scatter,
        **{f"Cache.{name}": getattr(Cache, name) for name in ("adopt", "step", "truncate", "release", "thin")},
    }  # fmt: skip
    for name, function in functions.items():
        program = jax.jit(lambda *args, function=function, **options: function(*args, **options))
        monkeypatch.setitem(bytes_machine.programs(False), name, program)
    with pytest.raises(AssertionError, match=f"^step {noticed}"):
        carry_out(config, lambda _: history)


ROWS = np.zeros((3, 16), int).tolist()
STEPS = [
    *served([0, 1, 2, 0, 1, 2], [1, 1])[:2],
    call("decode", k=4, active=[True] * 3, num_tokens=[2, 4, 0], tokens=ROWS, wide=False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "noticed"),
    [
        (None, ("decode", "block given back")), (forgetful, "3, .*is read by"), (greedy, "3, .*tables hold blocks"),
        (boastful, "3, .*row 0 has"),
    ],
)  # fmt: skip
def test_mistakes_in_a_block_of_steps_are_noticed(mistake, noticed, monkeypatch):
    assert_noticed(CONFIGS["fast host"], STEPS, mistake, noticed, monkeypatch)


TEXT, ALL = {"tokens": [0, 1, 2, 0, 1, 2, 2, 0, 1, 2], "namespace": 0}, [[True] * 4] * 3


def displaced(monkeypatch):
    """A `scatter` into the pool row of another column."""
    scatter = stage.scatter

    def wrong(pools, staged, rows, counts):
        swapped = [jnp.asarray(of_group)[jnp.array([1, 0, 2, 3])] for of_group in rows]
        return scatter(pools, staged, swapped, counts)

    monkeypatch.setattr(kvjax.cache, "scatter", wrong)
    monkeypatch.setattr(bytes_machine, "scatter", wrong)


def hopeful(monkeypatch):
    """An adoption of all blocks, also of those whose K/V are not at hand, or have not arrived."""
    adopt, finish_adoption = Cache.adopt, kvjax.stores.finish_adoption
    monkeypatch.setattr(Cache, "adopt", lambda cache, tokens, length, kv, have, **options: adopt(
        cache, tokens, length, kv, have | True, **options))  # fmt: skip
    monkeypatch.setattr(kvjax.stores, "finish_adoption", lambda state, adopted, arrived, **options: finish_adoption(
        state, adopted, arrived | True, **options))  # fmt: skip


def unheld(monkeypatch):
    """An `adopt` that holds nothing of what was found and nothing that it takes."""
    adopt = kvjax.stores.adopt

    def wrong(state, *args, **options):
        after, events = adopt(state, *args, **options)
        groups = [
            group.replace(blocks=group.blocks.replace(refcount=old.blocks.refcount))
            for group, old in zip(after.groups, state.groups, strict=True)
        ]
        return after.replace(groups=tuple(groups)), events

    monkeypatch.setattr(kvjax.stores, "adopt", wrong)


IN_PARTS = [
    call("reserve", **TEXT, have=ALL, wide=False),
    call("deliver", which=0, came=[[True, True, False, True]] * 3),
    call("finish_adoption", which=0, arrived=ALL, again=True),
]


def at_once(have):
    return [call("adopt", **TEXT, have=have, wide=False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("history", "mistake", "noticed"),
    [
        (at_once(ALL), None, ("adopted",)), (IN_PARTS, None, ("landed", "dropped", "BAD_REQUEST")),
        (at_once(ALL), displaced, "1, .* is read by .*block"),
        (at_once([[True, False] * 2] * 3), hopeful, "1, .* holds nan"),
        (IN_PARTS, displaced, "2, .* is read by .*an adoption"),
        (IN_PARTS, hopeful, "3, .* has landed without its bytes"), (IN_PARTS, unheld, "1, .*broken"),
    ],
)  # fmt: skip
def test_mistakes_in_adoptions_are_noticed(history, mistake, noticed, monkeypatch):
    assert_noticed(CONFIGS["windows, int8"], history, mistake, noticed, monkeypatch)


def no_ends(monkeypatch):
    """A `recur` that keeps no snapshot at the end of a block."""
    put = recurrent._Snapshots.put

    def wrong(snapshots, slot, states, num_tokens):
        new = put(snapshots, slot, states, num_tokens)
        return jax.tree.map(lambda new, old: jnp.where(num_tokens % SIZE == 0, old, new), new, snapshots)

    monkeypatch.setattr(recurrent._Snapshots, "put", wrong)


def partial(monkeypatch):
    """A cache that reuses a part of a block."""
    monkeypatch.setattr(kvjax.CacheSpec, "__post_init__", lambda spec: None)


def anywhere(monkeypatch):
    """A `truncate` that cuts into blocks."""
    monkeypatch.setattr(kvjax.CacheSpec, "has_recurrent", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "noticed"),
    [
        (None, ("hit", "decode", "BAD_REQUEST")), (no_ends, "2, .*snapshot .* after .2. tokens"),
        (partial, "4, .*snapshot .* after .6. tokens"), (forgetful, "6, .*row 0"),
        (anywhere, "7, .*snapshot .* after .8. tokens"),
    ],
)  # fmt: skip
def test_mistakes_with_snapshots_are_noticed(mistake, noticed, monkeypatch):
    config = CONFIGS["fast recurrent"]
    if mistake is partial:
        config = dataclasses.replace(config, options={"partial_reuse": True})
    history = [
        *served([0, 1, 2, 0, 1, 2]),
        *served([0, 1, 2, 0, 1, 1])[:2],
        call("decode", k=4, active=[True] * 3, num_tokens=[3, 0, 0], tokens=ROWS, wide=False),
        call("truncate", seq=0, drop=2),
    ]
    assert_noticed(config, history, mistake, noticed, monkeypatch)


def shameless(monkeypatch):
    """A `commit` that publishes what rows write after a hole."""
    monkeypatch.setattr(holes, "without_private", lambda seqs, filled: filled)


def tempted(monkeypatch):
    """A `release` that stores the tail of a row with a hole."""
    monkeypatch.setattr(holes, "unless_private", lambda row, where: where)


def careless(monkeypatch):
    """A `thin` that leaves blocks in the index when nobody holds their prefix."""
    monkeypatch.setattr(holes, "stranded", lambda state, freed: freed & False)


def thinned(*seqs):
    return call("thin", seqs=[*seqs, -1], columns=[[False, True, False, False]] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "length", "counts", "noticed"),
    [
        (None, 10, (4, 3), ("thin", "left to others by thin", "freed by thin")),
        (careless, 14, (1, 1), "5, .*broken: .*a held block has a held parent"),
        (shameless, 10, (4, 3), "6, .*row 1 shares pool rows"),
        (tempted, 10, (1, 0), "7, .*is read by .*block"),
    ],
)
def test_kv_after_a_hole_that_others_could_find_are_noticed(mistake, length, counts, noticed, monkeypatch):
    """A row and its fork let go of a block, and go on: what they write then is of another function than their text."""
    admitted, committed, _ = served(([0, 1, 2] * 5)[:length])
    history = [
        admitted | {"wide": False},
        committed,
        call("fork", src=0, dst=1),
        thinned(0),
        thinned(1),
        call("decode", k=4, active=[True] * 3, num_tokens=[*counts, 0], tokens=ROWS, wide=False),
        call("release", seqs=[0, 1]),
    ]
    assert_noticed(CONFIGS["fast thinning"], history, mistake, noticed, monkeypatch)


@pytest.mark.long
def test_bytes_of_rows_with_holes():
    tally = live(CONFIGS["fast thinning"], seed=1, steps=500).tally
    things = "hit", "merged", "slid", "fork", "truncate", "decode", "freed by thin", "left to others by thin"
    assert_happened(tally, *things)


@pytest.mark.slow
def test_bytes_of_verbs_in_their_form_for_a_gpu():
    life = live(CONFIGS["fast lowered"], seed=0, steps=500)
    assert_happened(life.tally, *HAPPENS, *ADOPTED)
    traced = life.programs["Cache.extend"].trace(life.cache, np.ones(3, bool), max_tokens=bytes_machine.MAX_TOKENS)
    assert "seldom" in traced.lower().as_text(debug_info=True)


@pytest.mark.slow
def test_quantised_bytes_under_windows():
    tally = live(CONFIGS["fast windows"], seed=3, steps=400).tally
    assert_happened(tally, "hit", "partial hit", "merged", "slid", *ADOPTED, "landed beside the first group")


@pytest.mark.slow
def test_bytes_of_recurrent_layers():
    tally = live(CONFIGS["fast recurrent"], seed=3, steps=400).tally
    assert_happened(tally, "hit", "merged", "slid", "offloaded", *ADOPTED, "landed beside the first group")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fast mesh", "fast context"])
def test_bytes_on_a_mesh(name):
    assert_happened(live(CONFIGS[name], seed=9, steps=500).tally, *HAPPENS, *ON_HOSTS, *ADOPTED)


@pytest.mark.slow
def test_bytes_of_pools_by_token():
    assert_happened(live(CONFIGS["fast tokens"], seed=9, steps=500).tally, *HAPPENS, *ON_HOSTS, *ADOPTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context, host, int8", "context, latents"])
def test_bytes_of_blocks_that_devices_divide(name):
    assert_happened(live(CONFIGS[name], seed=3, steps=300).tally, "hit", "generated", "failed", *ADOPTED)


@pytest.mark.slow
def test_bytes_of_rollouts_and_scores():
    tally = live(CONFIGS["rollouts"], seed=1, steps=300).tally
    things = "rollout hit", "generated", "scored", "not scored", "beside other rows", "forget_namespaces"
    assert_happened(tally, *things, *PARKED, *OF_VERSIONS)


@pytest.mark.slow
def test_bytes_of_rollouts_and_parked_requests_that_move_blocks_in_their_programs():
    tally = live(CONFIGS["rollouts, backups"], seed=1, steps=300).tally
    things = "rollout hit", "generated", "left in a program", "back in a program", "kept on the host"
    assert_happened(tally, *things, *PARKED)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["rollout", "score"])
def test_weights_without_a_namespace_of_their_own_are_noticed(verb, monkeypatch):
    request = {
        "prompts": [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 1], [1, 2]], "completions": [[[0, 1, 2, 0]] * 2] * 3,
        "ends": [[4, 4]] * 3,
    }  # fmt: skip
    history = [call(verb, **request, space_of=[0, 1, 0]), call("update"), call(verb, **request, space_of=[2, 3, 2])]
    carry_out(CONFIGS["rollouts"], lambda _: history)
    programs = bytes_machine.programs(False)
    program = programs[verb]

    def wrong(*args, namespace, **options):
        return program(*args, namespace=namespace % bytes_machine.TENANTS, **options)

    monkeypatch.setitem(programs, verb, wrong)
    with pytest.raises(AssertionError, match=r"^step 3, .* wanted"):
        carry_out(CONFIGS["rollouts"], lambda _: history)


@pytest.mark.slow
def test_bytes_of_batches_with_other_rows():
    """Moves fail while prompts are onboarded and rows are swapped out. Other rows, of no request, run meanwhile too."""
    tally = live(CONFIGS["batches"], seed=1, steps=120).tally
    assert_happened(tally, "failed in generate", "generated", "generate hit", "beside other rows", "swap_out")


@pytest.mark.slow
def test_bytes_of_drafts_on_a_mesh():
    tally = live(CONFIGS["drafts, mesh"], seed=1, steps=300).tally
    assert_happened(tally, "drafted", "accepted", "generated", "generate hit", "beside other rows", "slid")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_bytes_through_every_verb(name):
    jax.clear_caches()  # the programs of the configuration before: see `forget_programs`
    config = CONFIGS[name]
    tally = live(config, seed=1, steps=NIGHTLY // len(SLOW)).tally
    things = [*HAPPENS, *ADOPTED, *OF_VERSIONS]
    things += ["rows by name", "generated", "generate hit", "beam_step", "pin", "evict", "reset"]
    things += [*ON_HOSTS, "watermark", "swap_in", "swap_out", "offload", "onboard"] if config.host else []
    things += ["failed in adopt", "failed in reserve"] if config.host else []
    things += ["slid", "landed beside the first group"] if config.spec().groups[1:] else []
    if not config.spec().partial_reuse:
        things = [thing for thing in things if thing not in ("partial hit", "copied from the host", "lost")]
    assert_happened(tally, *things)
