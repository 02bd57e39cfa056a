# SPDX-License-Identifier: Apache-2.0
"""The decoder against reference outputs, its configs, `models.verify`, and the bundled model."""

import json
import pathlib
import re

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from models import Decoder, LayerConfig, ModelConfig, Rope, load, recall, save, train, verify
from tests.models.families import FULL, GEMMA4, SLIDING, SMALL, config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA3 = {**SMALL, "model_type": "gemma3_text", "head_dim": 6, "query_pre_attn_scalar": 10, "sliding_window": 5}


@pytest.mark.slow
def test_verify_fails_on_wrong_outputs_and_reports_bad_folders(tmp_path, capsys):
    folder = tmp_path / "other"
    write_golden(folder, lengths=[1, 20, 33], steps=[5, 0, 3])
    assert verify.main([str(folder)]) == 0
    with np.load(folder / "golden.npz") as file:
        arrays = dict(file)
    arrays["greedy_logits"][2, 1, 7] += 0.1
    np.savez(folder / "golden.npz", **arrays)
    assert verify.main([str(folder)]) == 1
    assert "FAILED" in capsys.readouterr().out

    np.savez(folder / "golden.npz", **{**arrays, "lengths": np.array([1, 20, 99])})
    assert verify.main([str(folder), str(tmp_path / "nothing")]) == 1
    errors = capsys.readouterr().err
    assert "lengths[2] is 99, wanted 1 to 40" in errors
    assert "config.json" in errors
    (folder / "golden.npz").write_bytes(b"something else")
    assert verify.main([str(folder)]) == 1
    assert "not a readable npz file" in capsys.readouterr().err


def write_golden(folder: pathlib.Path, lengths: list[int], steps: list[int]) -> None:
    """A golden folder of another family, size and vocabulary, made with the dense forward."""
    windows = {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1}
    fields = {"model_type": "qwen2", "vocab_size": 50, "tie_word_embeddings": True, "num_hidden_layers": 2}
    model = Decoder(config(**fields, **windows), rngs=nnx.Rngs(1))
    save(model, folder)
    rng, width, most = np.random.default_rng(0), 40, max(steps)
    rows, dense = len(lengths), jax.jit(Decoder.dense)
    prompts, greedy = np.full((rows, width), -1, np.int32), np.full((rows, most), -1, np.int32)
    logits, greedy_logits = np.zeros((rows, width, 50), np.float32), np.zeros((rows, most, 50), np.float32)
    for row, (length, count) in enumerate(zip(lengths, steps, strict=True)):
        text = np.zeros((1, width + most), np.int32)
        text[0, :length] = prompts[row, :length] = rng.integers(50, size=length)
        for step in range(count):
            greedy_logits[row, step] = dense(model, text)[0, length + step - 1]
            text[0, length + step] = greedy[row, step] = np.argmax(greedy_logits[row, step])
        logits[row, :length] = dense(model, text)[0, :length]
    np.savez(
        folder / "golden.npz", prompts=prompts, lengths=np.array(lengths, np.int32), logits=logits, greedy=greedy,
        greedy_logits=greedy_logits,
    )  # fmt: skip


def test_windows_are_read_per_layer():
    def windows(**fields):
        return [layer.window for layer in config(**fields).layers]

    qwen = {"model_type": "qwen2", "sliding_window": 6}
    assert windows(model_type="mistral") == [4096] * 3
    assert windows(model_type="mistral", sliding_window=None) == [None] * 3
    assert windows(**qwen) == [None] * 3
    assert windows(**qwen, use_sliding_window=True, max_window_layers=2) == [None, None, 6]
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(**qwen, use_sliding_window=True, layer_types=types) == [6, None, 6]
    assert [spec.window for spec in Decoder(config(**qwen), rngs=nnx.Rngs(0)).layer_specs()] == [None] * 3


def test_defaults_where_the_config_is_silent():
    assert config(num_key_value_heads=None).layers[0] == LayerConfig(4, 4)
    assert config(head_dim=10).layers[0].head_dim == 10
    assert config(model_type="qwen3").layers[0].head_dim == 128
    assert config(model_type="qwen2").qkv_bias and not config(model_type="qwen2").out_bias
    assert config(eos_token_id=[3, 4]).eos_token_ids == (3, 4)
    assert config(eos_token_id=2).eos_token_ids == (2,)


def test_rope_in_old_and_new_form():
    old = config(rope_theta=5e5, rope_scaling=LLAMA3)
    assert old == config(rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4}).layers[0].rope == Rope(
        5e5, "linear", 4.0
    )
    assert config(rope_scaling=None).layers[0].rope == Rope(10000.0)


def test_llama3_rope_keeps_short_waves_and_stretches_long_ones():
    rope, plain = config(rope_theta=5e5, rope_scaling=LLAMA3).layers[0].rope, Rope(5e5).frequencies(128)
    stretched = rope.frequencies(128)
    waves = 2 * np.pi / plain
    np.testing.assert_allclose(stretched[waves < 8192 / 4], plain[waves < 8192 / 4], rtol=1e-6)
    np.testing.assert_allclose(stretched[waves > 8192], plain[waves > 8192] / 8, rtol=1e-6)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any() and np.all(stretched[between] < plain[between])
    assert np.all(stretched[between] > plain[between] / 8)
    # One frequency by hand: half of the way from 1 to 4 turns is 2.5.
    assert 2.5 * 2 * np.pi / 8192 * (0.5 + 0.5 / 8) == pytest.approx(_llama3_at(2.5))
    np.testing.assert_allclose(Rope(5e5, "linear", 4.0).frequencies(128), plain / 4, rtol=1e-6)


def _llama3_at(turns: float) -> float:
    """The frequency that llama3 scaling gives for one with so many turns within the original context."""
    theta = (turns * 2 * np.pi / 8192) ** -2  # the second of two pairs has frequency theta ** -(1 / 2)
    return float(Rope(theta, "llama3", 8.0, 1.0, 4.0, 8192).frequencies(4)[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma2"}, "model_type: got 'gemma2', wanted 'llama' or"),
        ({"model_type": None}, "model_type: got None"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type: got 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type: got 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters: got"),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3}, "rope_scaling: got"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "rope_scaling.factor: got None"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor: got 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: got"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor"),
        ({"head_dim": 5}, "head_dim: got 5, wanted an even number"),
        ({"hidden_size": None}, "hidden_size: got None, wanted an int"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: got 0, wanted a positive number"),
        ({"attention_bias": "yes"}, "attention_bias: got 'yes'"),
        ({"eos_token_id": 3.5}, "eos_token_id: got 3.5, wanted token ids"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id: got [1, '</s>'], wanted token ids"),
        ({"layer_types": 3}, "layer_types: got 3, wanted a list"),
        ({"layer_types": ["full_attention"]}, "layer_types: got 1 entries"),
        ({"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "layer_types[2]: got 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types[0]: got 'sliding_attention'"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**fields)


def test_gemma_configs_in_old_and_new_form():
    """The forms of transformers 4.50 and 5.23, with and without optional fields."""

    def gemma3(**fields):
        return config(**{**GEMMA3, "num_hidden_layers": 7, **fields})

    types = [SLIDING] * 5 + [FULL, SLIDING]
    new = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, SLIDING: {"rope_theta": 1e3}}
    one = gemma3(layer_types=types, rope_parameters=new)
    assert [layer.window for layer in one.layers] == [5] * 5 + [None, 5]
    assert one.layers[5].rope == Rope(5e5, "linear", 8.0) and one.layers[6].rope == Rope(1e3)
    assert one.attention_scale == 10**-0.5 and one.embed_scale == 4.0
    old = {"rope_theta": 5e5, "rope_local_base_freq": 1e3, "rope_scaling": {"type": "linear", "factor": 8.0}}
    assert gemma3(sliding_window_pattern=6, **old) == gemma3(**old) == one
    assert gemma3(rope_parameters={FULL: None}).layers[5].rope == gemma3().layers[5].rope == Rope(1e6)
    assert [layer.window for layer in gemma3(sliding_window_pattern=3).layers][:4] == [5, 5, None, 5]
    # The released files have few fields, and those with towers have them one level down.
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    released = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (released.num_heads, released.vocab_size, released.eos_token_ids) == (8, 262208, (1, 106))
    assert released.layers[5] == LayerConfig(4, 256, rope=Rope(1e6)) and released.layers[0].window == 1024
    assert released.tie_word_embeddings and released.attention_scale == 1 / 16


def test_gemma4_layers():
    def layers(num_layers=6, **fields):
        return config(**{**GEMMA4, "num_hidden_layers": num_layers, **fields}).layers

    rope = Rope(1e6, "proportional", share=0.25)
    assert layers()[4:] == (LayerConfig(2, 6, 5, Rope(1e4)), LayerConfig(2, 8, None, rope))
    assert layers(8)[7].window is None  # the last one is full whatever the pattern says
    assert layers(num_global_key_value_heads=1)[5].kv_heads == 2  # only where keys are values
    assert layers(num_global_key_value_heads=1, attention_k_eq_v=True)[5] == LayerConfig(1, 8, None, rope, True)
    # A layer's own shape replaces that of the full layers. Keys may have leading zeros.
    own = layers(12, per_layer_config={"05": {"head_dim": 10}, "11": {"num_key_value_heads": 4, "hidden_size": 16}})
    assert [(layer.kv_heads, layer.head_dim) for layer in own] == [(2, 6)] * 5 + [(2, 10)] + [(2, 6)] * 5 + [(4, 6)]
    assert layers(per_layer_config={})[5].head_dim == 6
    shared = layers(9, layer_types=[SLIDING, SLIDING, FULL] * 3, num_kv_shared_layers=4, attention_k_eq_v=True)
    assert [layer.reuses for layer in shared] == [None] * 5 + [2, 4, 4, 2]
    with pytest.raises(ValueError, match=re.escape("layer_types[2]: got 'sliding_attention', wanted 'full_attention'")):
        layers(3, layer_types=[FULL, FULL, SLIDING])
    with pytest.raises(ValueError, match=re.escape("num_kv_shared_layers: got 5 of 6 layers, wanted some 'full_atten")):
        layers(num_kv_shared_layers=5)
    with pytest.raises(ValueError, match="per_layer_config: got other K/V in layer 5 than in layer 2, which it reuses"):
        layers(
            layer_types=[SLIDING, SLIDING, FULL] * 2, num_kv_shared_layers=1, per_layer_config={"5": {"head_dim": 8}}
        )


def test_proportional_rope_turns_the_first_pairs_only():
    plain = Rope(1e6).frequencies(32)
    np.testing.assert_allclose(Rope(1e6, "proportional", share=0.25).frequencies(32), [*plain[:4], *[0] * 12])
    np.testing.assert_allclose(Rope(1e6, "proportional", 2.0, share=0.3).frequencies(32), [*plain[:4] / 2, *[0] * 12])
    np.testing.assert_allclose(Rope(1e6, "proportional").frequencies(32), plain)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation: got 'relu', wanted 'gelu_pytorch_tanh'"),
        ({"sliding_window": None}, "sliding_window: got None, wanted an int"),
        (
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types[0]: got 'chunked_attention', wanted 'full_attention'",
        ),
        ({"layer_types": 3}, "layer_types: got 3, wanted a list"),
        ({"layer_types": [FULL]}, "layer_types: got 1 entries, wanted num_hidden_layers=3"),
        ({"rope_parameters": LLAMA3}, "rope_parameters: got {"),
        ({"rope_parameters": {SLIDING: {"rope_type": "yarn"}}}, f"rope_parameters.{SLIDING}.rope_type: got 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}, "sliding_window_pattern": 2}, "rope_scaling.factor: got None"),
        ({"rope_scaling": 8.0}, "rope_scaling: got 8.0, wanted a set of fields"),
        ({"rope_parameters": {FULL: LLAMA3}, "rope_scaling": LLAMA3}, "rope_scaling: got"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: got True, wanted False"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: got -1.0"),
        ({"model_type": "gemma3"}, "text_config: got None"),
        ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "text_config.model_type: got 'llama'"),
        ({**GEMMA4, "enable_moe_block": True}, "enable_moe_block: got True, wanted False"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all'"),
        ({**GEMMA4, "num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor"),
        ({**GEMMA4, "global_head_dim": 7}, "head_dim: got 7, wanted an even number"),
        ({**GEMMA4, "per_layer_config": {"3": {"head_dim": 8}}}, "per_layer_config.3: wanted layer numbers 0 to 2"),
        ({**GEMMA4, "per_layer_config": {"1": {"head_dim": 0}}}, "per_layer_config.1.head_dim: got 0"),
        ({**GEMMA4, "per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config.1.hidden_size: got 8, wanted 16"),
        ({**GEMMA4, "per_layer_config": [{}]}, "per_layer_config: got [{}]"),
        (
            {**GEMMA4, "rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            f"rope_parameters.{FULL}.partial_rotary_factor: got 1.5, wanted at most 1",
        ),
    ],
)
def test_gemma_configs_that_cannot_be_served_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**{**GEMMA3, **fields})


def test_configs_survive_the_way_through_hugging_face_fields():
    configs = [
        config(attention_bias=True, mlp_bias=True, eos_token_id=7),
        config(rope_theta=5e5, rope_scaling=LLAMA3),
        config(model_type="mistral", sliding_window=9),
        config(model_type="mistral", sliding_window=None),
        config(model_type="qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
        config(model_type="qwen3", rope_scaling={"type": "linear", "factor": 2.0}, tie_word_embeddings=True),
        config(**GEMMA3),
        config(**GEMMA3, layer_types=[FULL] * 3, final_logit_softcapping=3.0, attention_bias=True),
        config(**{**GEMMA3, "sliding_window_pattern": 2, "query_pre_attn_scalar": 144, "eos_token_id": [1, 30]}),
        config(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
        config(**GEMMA4, layer_types=[SLIDING, FULL, FULL], num_kv_shared_layers=1, use_double_wide_mlp=True),
        config(**{**GEMMA4, "hidden_size_per_layer_input": 0, "per_layer_config": {}, "tie_word_embeddings": False}),
    ]
    for one in configs:
        assert ModelConfig.from_hf(json.loads(json.dumps(one.to_hf()))) == one


def test_recall_documents_questions_and_batches_agree():
    rng = np.random.default_rng(0)
    document = recall.make_document(rng, 64)
    person, place = next(iter(document.facts.items()))
    prompt = document.text + " " + recall.question(person)
    assert document.ids + recall.encode(recall.question(person)) == recall.encode(prompt)
    assert len(document.ids) == 64 * recall.FACT_TOKENS
    assert recall.decode(document.ids) == document.text
    assert recall.make_tokenizer().encode(prompt.replace(" .", ".").replace(" ?", "?")).ids == recall.encode(prompt)
    assert recall.encode("where is nobody ?")[2] == recall.IDS["<unk>"]
    assert place in recall.PLACES
    assert len(set(recall.VOCABULARY)) == len(recall.VOCABULARY)

    tokens, marks = recall.make_batch(rng, 3, 9, 9)
    for row in tokens:
        words = recall.decode(row[: 9 * recall.FACT_TOKENS]).split()
        facts = dict(zip(words[::5], words[3::5], strict=True))
        assert len(facts) == 9
        people = [recall.VOCABULARY[row[mark - 1]] for mark in marks]
        assert sorted(people) == sorted(facts)
        assert [recall.VOCABULARY[row[mark + 1]] for mark in marks] == [facts[person] for person in people]
    for bad in ((0, 1), (4, 5), (1000, 1)):
        with pytest.raises(ValueError, match="wanted 1 to"):
            recall.make_batch(rng, 1, *bad)


def test_the_bundled_model_answers():
    model, tokenizer = load(recall.CHECKPOINT)
    assert model.config == train.CONFIG
    assert sum(file.stat().st_size for file in recall.CHECKPOINT.iterdir()) < 2_000_000
    assert tokenizer.get_vocab() == recall.IDS
    for num_facts in (4, 48, 64):
        assert train.accuracy(model, num_facts, num_documents=16) >= 0.98


@pytest.mark.slow
def test_training_learns_and_leaves_the_first_layer_alone(monkeypatch):
    monkeypatch.setattr(train, "CURRICULUM", (train.Stage(2, 2, 8, 30),))
    monkeypatch.setattr(train, "WARMUP", 5)
    start = Decoder(train.CONFIG, rngs=nnx.Rngs(0))
    train.fix_first_layer(start)
    tokens, marks = recall.make_batch(np.random.default_rng(5), 8, 2, 2)
    with jax.numpy_dtype_promotion("standard"):  # optax's moments count on it
        model, again = train.train(), train.train()
    assert train.score(model, tokens, marks)[0] < 0.7 * train.score(start, tokens, marks)[0]
    assert jax.tree.leaves(nnx.state(start, train.is_fixed))
    chex.assert_trees_all_equal(nnx.state(start, train.is_fixed), nnx.state(model, train.is_fixed))
    chex.assert_trees_all_equal(nnx.state(model), nnx.state(again))


def test_tally_allows_rounding_and_close_ties_only():
    reference = np.array([1.0, 3.0, 2.0], np.float32)
    tally = verify.Tally()
    tally.compare(reference + 1e-3, reference, 1)
    assert tally.ok and (tally.greedy, tally.same) == (1, 1)
    tally.compare(np.array([1.0, 3.0, 3.0005], np.float32), np.array([1.0, 3.0, 2.9999], np.float32), 1)
    assert tally.ok and (tally.greedy, tally.same) == (2, 1)  # the other token, but the reference's margin is small
    tally.compare(np.array([1.0, 3.0, 3.1], np.float32), reference, 1)
    assert tally.wrong == 1 and not tally.ok
    for bad in (reference + 0.01, reference * np.nan):
        tally = verify.Tally()
        tally.compare(bad, reference, None)
        assert not tally.ok
    assert not verify.Tally().ok  # a verification that compares nothing is refused
