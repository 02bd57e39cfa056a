# SPDX-License-Identifier: Apache-2.0
"""The evaluation harness lm-eval against a running server: its numbers are those of transformers (`make test-eval`).

The task is in `tests/data/lm_eval`: continuations of golden prompts, whose log-probabilities transformers has computed.
"""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.drive import ROOT
from tests.models.serve_kit import KEY, Running, idle

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: make test-eval")
pytest.importorskip("transformers", reason="needs transformers: make test-eval")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
FOLDER, VOCABULARY = ROOT / "tests/data/lm_eval", 256


def make_folders(where):
    """The golden checkpoint, and a tokenizer whose token 17 is the word w017; transformers changes others."""
    checkpoint, words = shutil.copytree(ROOT / "tests/data/goldens/llama", where / "checkpoint"), where / "words"
    tokenizer = Tokenizer(models.WordLevel({f"w{token:03}": token for token in range(VOCABULARY)}, unk_token="w000"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.mkdir()
    for folder in (checkpoint, words):
        tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "w001",
        "pad_token": "w001",
        "unk_token": "w000",
    }
    (words / "tokenizer_config.json").write_text(json.dumps(names))
    return checkpoint, words


@pytest.mark.parametrize("num_concurrent", [1, 4])
def test_the_log_probabilities_of_a_local_task_are_those_of_transformers(tmp_path, monkeypatch, num_concurrent):
    monkeypatch.chdir(ROOT)  # the task names its file
    for name, value in {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    checkpoint, words = make_folders(tmp_path)
    server = Running(checkpoint)
    try:
        arguments = {
            "model": "checkpoint", "base_url": f"{server.url}/v1/completions", "tokenizer_backend": "huggingface",
            "tokenizer": str(words), "num_concurrent": num_concurrent, "max_length": 1024,
        }  # fmt: skip
        found = lm_eval.simple_evaluate(
            model="local-completions", model_args=arguments, tasks=["continuations"],
            task_manager=lm_eval.tasks.TaskManager(include_path=str(FOLDER), include_defaults=False),
            batch_size=1, bootstrap_iters=0, random_seed=0,
        )  # fmt: skip
        idle(server)
    finally:
        server.close()
    docs = [json.loads(line) for line in (FOLDER / "continuations.jsonl").read_text().splitlines()]
    samples = sorted(found["samples"]["continuations"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(docs) and found["results"]["continuations"]["acc,none"] == 1.0
    for doc, sample in zip(docs, samples, strict=True):
        assert sample["doc"]["context"] == doc["context"]
        logprobs = [float(logprob) for logprob, _ in sample["filtered_resps"]]
        assert logprobs == pytest.approx(doc["logprobs"], abs=2e-3)
