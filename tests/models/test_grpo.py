# SPDX-License-Identifier: Apache-2.0
"""The training loop around `rollout` learns, reuses prompts, compiles once, and finds nothing of old weights."""

import jax
import numpy as np
import pytest

from models import commands, grpo


def report(number):
    return grpo.Report(np.float32(number / 10), np.float32(12 - number), np.int32(5264))


def test_a_plot_of_reward_and_length(tmp_path):
    grpo.plot([report(number) for number in range(5)], tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 1000


def test_the_command_draws_what_it_ran(tmp_path, monkeypatch, capsys):
    calls, file = [], tmp_path / "reward.svg"
    monkeypatch.setattr(commands, "enable_compilation_cache", lambda keep: None)
    monkeypatch.setattr(grpo, "run", lambda *args: calls.append(args) or [report(number) for number in range(3)])
    grpo.main(["--steps", "3", "--samples", "2", "--seed", "7", "--plot", str(file)])
    assert calls == [(3, 2, 7)] and "tokens of a completion" in file.read_text()
    with pytest.raises(SystemExit):
        grpo.main(["--plot", str(tmp_path / "reward.unknown")])
    assert "--plot: Format 'unknown' is not supported" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        grpo.main(["--samples", "1"])
    assert "--samples: got '1', wanted an int of at least 2 and at most 64" in capsys.readouterr().err


@pytest.mark.slow
def test_the_reward_rises(capsys):
    """The loop itself fails if a step after the first one is compiled."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax is not strict
        reports = grpo.run(24, seed=3)
    rewards, lengths = ([float(getattr(report, name)) for report in reports] for name in ("reward", "length"))
    assert np.mean(rewards[:4]) < 0.2 and np.mean(rewards[-4:]) > 0.5
    assert np.mean(lengths[-4:]) < np.mean(lengths[:4]) / 2
    prompt, question = grpo.WIDTH, 4
    computed = [grpo.PROMPTS * 8 * prompt - int(report.reused) for report in reports]
    # Of each version's first prompt all is computed, as nothing of old weights is found; of others the question.
    assert all(prompt <= number <= prompt + (grpo.PROMPTS - 1) * question for number in computed)
    out = capsys.readouterr().out
    assert "compiled in" in out and f"of {grpo.PROMPTS * 8 * prompt:8,}" in out
