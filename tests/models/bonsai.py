# SPDX-License-Identifier: Apache-2.0
"""A decoder in the form of jax-ml/bonsai, `Attention.__call__(x, cache, segment_ids)`, with dense K/V."""

import jax
import jax.numpy as jnp
from flax import nnx

EMBED, HEADS, KV_HEADS, WIDTH, VOCAB, LAYERS = 16, 4, 2, 4, 19, 2


class LayerCache(nnx.Module):
    """K/V [B, S, K, D] of all tokens so far."""

    def __init__(self, batch, size):
        self.k, self.v = (nnx.Variable(jnp.zeros((batch, size, KV_HEADS, WIDTH))) for _ in range(2))
        self.length = nnx.Variable(jnp.zeros((), jnp.int32))


def make_cache(batch, size):
    return [LayerCache(batch, size) for _ in range(LAYERS)]


def _generate_pos_embeddings(positions, head_dim):
    angles = positions[..., None].astype(jnp.float32) * 100.0 ** -(jnp.arange(head_dim // 2) / (head_dim // 2))
    return jnp.sin(angles), jnp.cos(angles)


def apply_rope(x, sin, cos):
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = sin[:, :, None], cos[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.Einsum("BTD,DNH->BTNH", (EMBED, HEADS, WIDTH), rngs=rngs)
        self.k_proj, self.v_proj = (
            nnx.Einsum("BSD,DKH->BSKH", (EMBED, KV_HEADS, WIDTH), rngs=rngs) for _ in range(2)
        )  # fmt: skip
        self.o_proj = nnx.Einsum("BTNH,NHD->BTD", (HEADS, WIDTH, EMBED), rngs=rngs)
        self.q_norm, self.k_norm = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.scale = WIDTH**-0.5

    def __call__(self, x, cache, segment_ids):
        length = x.shape[1]
        positions = jnp.broadcast_to(cache.length[...] + jnp.arange(length)[None], segment_ids.shape)
        sin, cos = _generate_pos_embeddings(positions, WIDTH)
        q, k = (apply_rope(y, sin, cos) for y in (self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))))
        for held, new in ((cache.k, k), (cache.v, self.v_proj(x))):
            held[...] = jax.lax.dynamic_update_slice_in_dim(held[...], new, cache.length[...], axis=1)
        cache.length[...] = cache.length[...] + length
        q = q.reshape(*q.shape[:2], KV_HEADS, -1, WIDTH)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, cache.k[...]) * self.scale
        seen = jnp.arange(cache.k.shape[1])[None, None] <= positions[..., None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        y = jnp.einsum("bkgts,bskd->btkgd", weights, cache.v[...])
        return self.o_proj(y.reshape(*x.shape[:2], HEADS, WIDTH))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.input_layernorm, self.attn = nnx.RMSNorm(EMBED, rngs=rngs), Attention(rngs)
        self.mlp = nnx.Linear(EMBED, EMBED, rngs=rngs)

    def __call__(self, x, cache, segment_ids):
        x = x + self.attn(self.input_layernorm(x), cache, segment_ids)
        return x + jnp.tanh(self.mlp(x))


class Decoder(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.embedder = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.final_norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.lm_head = nnx.Einsum("BTD,DV->BTV", (EMBED, VOCAB), rngs=rngs)

    def __call__(self, tokens, *, cache, segment_ids):
        x = self.embedder(tokens)
        for layer_index, layer in enumerate(self.layers):
            x = layer(x, cache[layer_index], segment_ids)
        return self.lm_head(self.final_norm(x))
