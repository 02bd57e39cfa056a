# SPDX-License-Identifier: Apache-2.0
"""Wrong outputs, which `models.verify` refuses; and the bundled model: its texts, its training, its answers."""

import pathlib

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from models import Decoder, load, recall, save, session, train, verify
from tests.models.families import config


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


SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
LARGER = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("fields", "chunk"),
    [({}, 512), ({**SMOLLM2, "num_hidden_layers": 30}, 256), ({**LARGER, "num_hidden_layers": 28}, 128)],
)
def test_the_chunk_follows_the_weights_of_the_layers(fields, chunk):
    """Those of the vocabulary are not counted."""
    of = config(vocab_size=150_000, **fields)
    assert session.default_chunk(nnx.eval_shape(lambda: Decoder(of, rngs=nnx.Rngs(0)))) == chunk
