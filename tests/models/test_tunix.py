# SPDX-License-Identifier: Apache-2.0
"""Tunix with kvjax as its rollout engine, compared with its own `vanilla` engine (`make test-tunix`)."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tunix", reason="needs google-tunix: make test-tunix")
    import optax
    import qwix
    from flax import nnx
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma4 import model as gemma4
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common, rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from benchmarks import rollout as rollout_benchmark
    from models.paged_decoders import paged
    from models.tunix import KvjaxRollout

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
SHAPE = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8}
VOCAB, MOST, WIDTH, SIZE = 32, 8, 16, 64
PROMPTS = ["hello"] * 2 + ["worlds"] * 2 + ["helloworlds"] * 2
GREEDY = RolloutConfig(MOST, top_p=None, max_prompt_length=WIDTH, kv_cache_size=SIZE, return_logprobs=True)


@pytest.fixture(autouse=True, scope="module")
def as_tunix_promotes():
    """Tunix relies on promotion of ranks and types, also in threads that it begins."""
    options = {"jax_numpy_rank_promotion": "allow", "jax_numpy_dtype_promotion": "standard"}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


class Letters:
    """A tokenizer: a letter is a token."""

    def encode(self, text):
        return [ord(letter) - 94 for letter in text]

    def decode(self, ids):
        return "".join(chr(94 + one) for one in ids)

    def bos_id(self):
        return 2

    def eos_id(self):
        return 1

    def pad_id(self):
        return 0


def make(seed=0, family=qwen3, **options):
    """A decoder with random weights everywhere; Tunix begins with zeros in its MLPs."""
    config = {**SHAPE, "num_kv_heads": 2, **options}
    if family is gemma3:
        config |= {"num_embed": VOCAB, "sliding_window_size": 5, "param_dtype": jnp.float32}
        module = gemma3.Gemma3(gemma3.ModelConfig(**config), rngs=nnx.Rngs(0))
    else:
        name = {qwen2: "Qwen2", qwen3: "Qwen3", llama3: "Llama3"}[family]
        config |= {"vocab_size": VOCAB, "norm_eps": 1e-6, "rope_theta": 1_000_000}
        module = getattr(family, name)(family.ModelConfig(**config), rngs=nnx.Rngs(0))
    leaves, tree = jax.tree.flatten(nnx.state(module))
    rng = np.random.default_rng(seed)
    leaves = [leaf + 0.2 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    nnx.update(module, jax.tree.unflatten(tree, leaves))
    return module


def engine(module, **options):
    return KvjaxRollout(module, Letters(), rollout_config=GREEDY, **{"block_size": 4, **options})


def vanilla(module):
    return VanillaRollout(module, Letters(), CacheConfig(SIZE, 2, 2, 8))


def arrays_of(output):
    """Prompts and completions of an output, padded as `GRPOLearner` does it."""
    completions = np.stack([np.pad(one, (0, MOST - one.size)) for one in output.tokens])
    return jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions)


FAMILIES = {
    "qwen3": {"remat_config": qwen3.RematConfig.DECODER, "use_tied_embedding": True},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "remat_config": qwen3.RematConfig.BLOCK},
    "llama3": {"family": llama3},
    "gemma3": {"family": gemma3, "num_layers": 7},  # the sixth has full attention
    "gemma3_mha": {"family": gemma3, "num_kv_heads": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_family_are_the_modules_own(family):
    """Prompts in chunks, and their last tokens alone."""
    module, length, chunk = make(**FAMILIES[family]), 23, 8
    tokens = np.random.default_rng(0).integers(1, VOCAB, (2, length)).astype(np.int32)
    positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
    mask = jnp.broadcast_to(np.tri(length, dtype=bool)[None], (2, length, length))
    wanted = nnx.jit(lambda module: module(tokens, positions, None, mask)[0])(module)
    model = paged(module)
    windows = {spec.window for spec in model.layer_specs()}
    assert windows == ({None} if "gemma" not in family else {5, None} if family == "gemma3" else {5})
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=16, max_seqs=2, max_length=32, block_size=4, dtype="float32")
    cache, step = kvjax.Cache.create(spec), jax.jit(kvjax.step, static_argnames="logits")
    cache, _ = jax.jit(kvjax.Cache.admit)(cache, np.arange(2, dtype=np.int32), tokens, np.full(2, length, np.int32))
    for begin in range(0, length, chunk):
        part = tokens[:, begin : begin + chunk]
        count, part = np.full(2, part.shape[1], np.int32), np.pad(part, ((0, 0), (0, chunk - part.shape[1])))
        _, last, _ = step(model, cache, part, count)
        cache, logits, _ = step(model, cache, part, count, logits="all")
        found = np.asarray(logits)[:, : count[0]]
        np.testing.assert_allclose(found, wanted[:, begin : begin + chunk], atol=1e-4)
        np.testing.assert_allclose(last, found[:, -1], atol=1e-4)
    assert type(module.layers[0].attn).__name__ == "Attention"


def test_greedy_tokens_and_log_probabilities_are_those_of_vanilla():
    module = make()
    rollout, own = engine(module), vanilla(module)
    found, wanted = rollout.generate(PROMPTS, GREEDY), own.generate(PROMPTS, GREEDY)
    assert found.text == wanted.text and found.logits == wanted.logits == []
    np.testing.assert_array_equal(found.left_padded_prompt_tokens, wanted.left_padded_prompt_tokens)
    for one, other in zip(found.tokens, wanted.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    # The prompt of the third group begins with the first one's, which is computed already.
    assert rollout.cached.tolist()[0] == 0 and rollout.cached[2] > 0
    prompts, completions = arrays_of(found)
    logps, wanted = (one.get_per_token_logps(prompts, completions) for one in (rollout, own))
    assert logps.shape == wanted.shape and logps.dtype == wanted.dtype
    mask = np.asarray(completions) != 0
    np.testing.assert_allclose(np.where(mask, logps, 0), np.where(mask, wanted, 0), atol=1e-4)
    empty = rollout.get_per_token_logps(prompts, completions.at[0].set(0))
    np.testing.assert_allclose(empty, np.where(np.arange(len(mask))[:, None] > 0, logps, 0), atol=1e-5)
    assert rollout.pad_id() == own.pad_id() and rollout.eos_id() == own.eos_id()
    assert rollout.generate("hello", GREEDY).text == found.text[:1]


def test_samples_have_log_probabilities_and_ends_as_in_vanilla():
    """Log-probabilities are those of Tunix' trainer at that temperature; no eos token is returned."""
    module, eos = make(), [5, 9]
    config = RolloutConfig(
        MOST, temperature=0.7, top_p=0.95, top_k=12, max_prompt_length=WIDTH, kv_cache_size=SIZE, return_logprobs=True,
        eos_tokens=eos, seed=jax.random.PRNGKey(3),
    )  # fmt: skip
    rollout = engine(module)
    found = rollout.generate(PROMPTS, config)
    assert min(one.size for one in found.tokens) < MOST
    assert not any(np.isin(one, eos).any() for one in found.tokens)
    assert found.text[0] != found.text[1] and found.text == rollout.generate(PROMPTS, config).text
    prompts, completions = arrays_of(found)
    wanted = common.compute_per_token_logps(*nnx.split(module), prompts, completions, 0, 1, temperature=0.7)
    for number, (tokens, logprobs) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
        if 0 not in tokens:  # which Tunix' trainer takes for padding
            np.testing.assert_allclose(logprobs, wanted[number, : tokens.size], atol=1e-4)
    assert rollout.generate(PROMPTS, RolloutConfig(MOST, temperature=0.0, max_prompt_length=WIDTH)).logprobs is None


def test_new_weights_find_nothing_old_and_compile_nothing():
    module, other = make(0), make(1)
    rollout, before = engine(module), [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(module))]
    first = rollout.generate(PROMPTS, GREEDY)
    programs = rollout.sampler.programs.sample._cache_size()
    rollout.update_params(nnx.state(other, (nnx.Param,)), (nnx.Param,))
    assert rollout.sampler.version == 1
    second = rollout.generate(PROMPTS, GREEDY)
    assert rollout.cached[0] == 0
    assert second.text != first.text
    rollout.update_params({"embedder": {"input_embedding": module.embedder.input_embedding[...]}})
    rollout.generate(PROMPTS, GREEDY)
    assert rollout.cached[0] == 0 and rollout.sampler.version == 2
    assert rollout.sampler.programs.sample._cache_size() == programs
    assert second.text == engine(other).generate(PROMPTS, GREEDY).text
    kvjax.check(rollout.sampler.cache.state)
    # The trainer's weights are not written, since the engine has its own from the first update on.
    for one, leaf in zip(before, jax.tree.leaves(nnx.state(module)), strict=True):
        np.testing.assert_array_equal(one, leaf)
    assert rollout.model() is not module


class Apart(Letters):
    """The same with padding that no model chooses."""

    def pad_id(self):
        return -1


def test_adapters():
    """LoRA by qwix, of which only the adapters are updated."""
    module = make()
    kinds = qwix.LoraProvider(module_path=".*(q_proj|v_proj|o_proj|gate_proj)", rank=4, alpha=8.0)
    module = qwix.apply_lora_to_model(module, kinds, **module.get_model_input())
    rollout = KvjaxRollout(module, Apart(), rollout_config=GREEDY, block_size=4)
    own = VanillaRollout(module, Apart(), CacheConfig(SIZE, 2, 2, 8))
    leaves, tree = jax.tree.flatten(nnx.state(module, nnx.LoRAParam))
    texts, rng = [], np.random.default_rng(0)
    for version in range(2):
        found = rollout.generate(PROMPTS, GREEDY)
        assert found.text == own.generate(PROMPTS, GREEDY).text and rollout.sampler.version == version
        texts.append(found.text)
        adapters = jax.tree.unflatten(tree, [leaf + 0.3 * rng.normal(size=leaf.shape).astype("f") for leaf in leaves])
        rollout.update_params(adapters, (nnx.LoRAParam,))
        own.update_params(adapters)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_two_devices(shape):
    """Kv heads are divided over `tp`; along `fsdp` both devices have the whole cache."""
    module, other = make(0), make(1)
    wanted = [engine(one).generate(PROMPTS, GREEDY).text for one in (module, other)]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(shape), ("fsdp", "tp"))
    rollout = KvjaxRollout(module, Letters(), mesh, GREEDY, block_size=4)
    assert rollout.model() is not module
    with mesh:
        found = [rollout.generate(PROMPTS, GREEDY).text]
        programs = rollout.sampler.programs.sample._cache_size()
        rollout.update_params(nnx.state(other, (nnx.Param,)), (nnx.Param,))
        found.append(rollout.generate(PROMPTS, GREEDY).text)
    assert found == wanted and rollout.sampler.programs.sample._cache_size() == programs
    array = rollout.sampler.cache.pools.arrays[0][0]
    assert array.addressable_shards[0].data.shape[3] == 2 // shape[1]


def mesh_of(*names):
    """A mesh of one device."""
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(names)), names)


class Watched(KvjaxRollout):
    """Notes the version, the tokens that were found, and the programs of each `generate`; and checks the cache."""

    notes: list

    def generate(self, prompts, rollout_config):
        output = super().generate(prompts, rollout_config)
        self.notes.append((self.sampler.version, self.cached, self.sampler.programs.sample._cache_size()))
        return output


STEPS, GROUP = 20, 4


def make_cluster(rollout_engine, axes=("fsdp", "tp"), **options):
    """A cluster with a tiny Qwen3, and rollouts on a mesh with these axes."""
    mesh, role = mesh_of("fsdp", "tp"), rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh_of(*axes)},
        rollout_engine=rollout_engine, **options,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(1e-2), eval_every_n_steps=1000, max_steps=STEPS, mini_batch_size=2,
            train_micro_batch_size=2,
        ),
        rollout_config=RolloutConfig(MOST, temperature=1.0, max_prompt_length=WIDTH, kv_cache_size=SIZE),
    )  # fmt: skip
    return rl_cluster.RLCluster(actor=make(), tokenizer=Letters(), cluster_config=config)


def train(cluster):
    """GRPO; returns greedy tokens before it and their log-probabilities, and the mean reward of each step."""
    rewards, rng = [], np.random.default_rng(0)

    def reward(prompts, completions, **_):
        rewards.append(np.mean([text.count("a") / MOST for text in completions]))
        return [text.count("a") / MOST for text in completions]

    before = cluster.rollout.generate(PROMPTS, GREEDY)
    logps = cluster.rollout.get_per_token_logps(*arrays_of(before))
    options = GRPOConfig(num_generations=GROUP, num_iterations=1, beta=0.0)
    learner = GRPOLearner(rl_cluster=cluster, algo_config=options, reward_fns=reward)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    texts = [["".join(rng.choice(letters, 6)) for _ in range(2)] for _ in range(STEPS)]
    learner.train([{"prompts": np.array(pair)} for pair in texts])
    return before, logps, rewards


def test_grpo_learns_as_with_vanilla():
    """Once with weights that trainer and engine share, and once with copies that `update_params` brings."""
    wanted, wanted_logps, rewards = train(make_cluster("vanilla"))
    assert np.mean(rewards[-5:]) > np.mean(rewards[:3]) + 0.5
    for axes in (("fsdp", "tp"), ("fsdp", "tp", "other")):
        notes = []
        watched = type("Watched", (Watched,), {"notes": notes})
        cluster = make_cluster(functools.partial(watched, block_size=4, max_seqs=8), axes)
        found, logps, rewards = train(cluster)
        assert found.text == wanted.text
        mask = np.asarray(arrays_of(found)[1]) != 0
        np.testing.assert_allclose(np.where(mask, logps, 0), np.where(mask, wanted_logps, 0), atol=1e-4)
        assert np.mean(rewards[-5:]) > np.mean(rewards[:3]) + 0.5
        before, *notes = notes
        assert [version for version, _, _ in notes] == list(range(STEPS))
        # No stale hit: all prompts begin with the same bos token, and the first of each step finds not even that.
        assert all(cached[0] == 0 for _, cached, _ in notes[1:])
        assert {programs - before[2] for _, _, programs in notes} == {1}
        kvjax.check(cluster.rollout.sampler.cache.state)
        after = engine(cluster.actor_trainer.model).generate(PROMPTS, GREEDY)
        assert cluster.rollout.generate(PROMPTS, GREEDY).text == after.text != found.text


def test_weights_on_the_host_between_calls():
    """Tunix' `offload_to_cpu` brings them back for each call."""
    cluster = make_cluster(functools.partial(KvjaxRollout, block_size=4), offload_to_cpu=True)
    texts, programs = [], []
    for _ in range(2):
        texts.append(cluster.generate(PROMPTS).text)
        programs.append(cluster.rollout.sampler.programs.sample._cache_size())  # jax counts those of other tests too
    assert texts[0] == texts[1] == make_cluster(KvjaxRollout).generate(PROMPTS).text
    assert cluster.rollout.cached[0] == 0 and programs[0] == programs[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"seed": np.zeros(3, np.uint32)}, "seed: got"),
        ({"seed": 0.5}, "seed: got 0.5"),
        ({"max_tokens_to_generate": 0}, "max_tokens_to_generate: got 0"),
        ({"max_prompt_length": 0}, "max_prompt_length: got 0"),
        ({"max_tokens_to_generate": SIZE}, "prompts: got one of 6 tokens for 64 new ones, wanted at most 64 together"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: got 2, wanted -1"),
        ({"expert_parallel_size": 2}, "expert_parallel_size: got 2, wanted 1"),
        ({"rollout_mapping_config": "mapping"}, "rollout_mapping_config: got 'mapping', wanted None"),
    ],
)
def test_bad_configurations(options, message):
    config = RolloutConfig(**{"max_tokens_to_generate": MOST, "max_prompt_length": WIDTH, **options})
    with pytest.raises(ValueError, match=message):
        engine(make()).generate(["hello"], config)


def test_bad_arguments():
    module = make()
    with pytest.raises(ValueError, match="rollout_config: got None, wanted it or max_length"):
        KvjaxRollout(module, Letters())
    with pytest.raises(ValueError, match="data_type: got float16, wanted None"):
        KvjaxRollout(module, Letters(), rollout_config=RolloutConfig(data_type=np.float16))
    with pytest.raises(ValueError, match="block_size: got 0"):
        engine(module, block_size=0)
    with pytest.raises(ValueError, match=r"prompts: got lengths \[\]"):
        engine(module).generate([], GREEDY)
    with pytest.raises(ValueError, match=r"completion_tokens: got shape \[3, 4\], wanted \[2, T\]"):
        engine(module).get_per_token_logps(np.ones((2, 4), int), np.ones((3, 4), int))
    with pytest.raises(ValueError, match=r"params: got embedder.other of shape \[2\], wanted the model's weights"):
        engine(module).update_params({"embedder": {"other": jnp.zeros(2)}})
    with pytest.raises(
        ValueError, match=r"params: got embedder.input_embedding of shape \[2\], wanted shape \[32, 32\]"
    ):
        engine(module).update_params({"embedder": {"input_embedding": jnp.zeros(2)}})


def test_other_families_are_refused():
    with pytest.raises(
        ValueError, match=r"layers\[0\].attn: got a Attention with \['k_bias', 'q_bias', 'v_bias'\], wanted"
    ):
        paged(make(family=qwen2))
    sizes = {**SHAPE, "num_embed": VOCAB, "num_kv_heads": 2, "sliding_window_size": 5}
    with pytest.raises(ValueError, match=r"layers\[0\].attn: got a Attention with .*'rope_proportion'"):
        paged(gemma4.Gemma4(gemma4.ModelConfig(**sizes), rngs=nnx.Rngs(0)))


def test_the_benchmark_of_rollouts():
    """Both engines choose the same tokens, in tiny shapes."""
    size = rollout_benchmark.measure.size(quick=True)
    faster, seconds = rollout_benchmark.compare_engines(size.config, size.group, size.rounds)
    assert faster > 0 and list(seconds) == ["vanilla_16_s", "engine_16_s"]
    assert rollout_benchmark.tunix_version()
