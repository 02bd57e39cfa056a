# SPDX-License-Identifier: Apache-2.0
"""The README's code runs as it stands there, and a Linen module takes the cache in the same way."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import kvjax
from tests.drive import ROOT

README = ROOT / "README.md"


@pytest.mark.long
def test_the_readmes_code_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves a cache, and loads a model
    (tmp_path / "models").symlink_to(ROOT / "models")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S))
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    assert "cached" in capsys.readouterr().out


def test_the_router_is_the_demos_own():
    licence, code = (ROOT / "models/prefix_router.py").read_text().split("\n", 1)
    assert licence.startswith("# SPDX") and f"```python\n{code}```\n" in README.read_text()
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 30


class Attention(nn.Module):
    layer: int

    @nn.compact
    def __call__(self, x, pools, view):
        qkv = nn.DenseGeneral((8, 16))(x)
        pools = kvjax.write(pools, self.layer, qkv[:, :, 4:6], qkv[:, :, 6:], view)
        y = kvjax.attend(qkv[:, :, :4], pools, self.layer, view)
        return x + nn.DenseGeneral(x.shape[-1], axis=(-2, -1))(y), pools


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens, pools, view, *, last):
        embed = nn.Embed(50, 32)
        x = embed(tokens)
        for layer in range(2):
            x, pools = Attention(layer)(x, pools, view)
        return embed.attend(x[jnp.arange(x.shape[0]), last]), pools


@pytest.mark.long
def test_a_linen_module_generates_through_the_cache():
    layers = [kvjax.LayerSpec(kv_heads=2, head_dim=16)] * 2
    spec = kvjax.make_spec(layers, num_blocks=32, max_seqs=2, max_length=64, block_size=8, dtype="float32")
    cache, module = kvjax.Cache.create(spec), Model()
    tokens, last = jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32)
    params = jax.jit(module.init)(jax.random.key(0), tokens, cache.pools, cache.view(1), last=last)
    model = jax.tree_util.Partial(lambda params, *args, **kwargs: module.apply(params, *args, **kwargs), params)
    prompt = [*range(20)]
    first, cache, _ = kvjax.generate(model, cache, [prompt, prompt], max_new_tokens=6)
    again, cache, _ = kvjax.generate(model, cache, [prompt, [3, 4]], max_new_tokens=6)
    assert again[0].tokens == first[0].tokens == first[1].tokens
    assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 19)
    kvjax.check(cache.state)
