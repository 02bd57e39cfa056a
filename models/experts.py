# SPDX-License-Identifier: Apache-2.0
"""The second half of a layer: a gated MLP, or a mixture of experts.

All experts are computed for every token, with zero weights for the experts that the token did not choose. So shapes do
not depend on the tokens, at the cost of num_experts / per_token times the necessary products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .fields import Table, count, read_table, write_table

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}


class MLP(nnx.Module):
    """The gated MLP, from the stream's width to an inner width and back."""

    def __init__(self, width: int, inner: int, dtype, rngs: nnx.Rngs, *, bias: bool = False, activation: str = "silu"):
        self.gate_proj = nnx.Linear(width, inner, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.up_proj = nnx.Linear(width, inner, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.down_proj = nnx.Linear(inner, width, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [R, C, E] to [R, C, E]."""
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class Router(nnx.Module):
    """The weights of all experts for each token. They are zero for experts that the token did not choose."""

    def __init__(self, width: int, config: ExpertsConfig, dtype, rngs: nnx.Rngs):
        self.config = config
        self.kernel = random_matrices(rngs, (width, config.num_experts), dtype)
        if config.corrected:
            self.e_score_correction_bias = nnx.Param(jnp.zeros(config.num_experts, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Weights f32[R, C, N] for x [R, C, E], computed in float32 because rounding would change the choice."""
        config = self.config
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.dot(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits, axis=-1) if config.softmax else jax.nn.sigmoid(logits)
        for_choice = scores + self.e_score_correction_bias[...][None, None] if config.corrected else scores
        weights = jnp.where(highest(self._in_chosen_groups(for_choice), config.per_token), scores, 0)
        if config.normalised:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * config.factor

    def _in_chosen_groups(self, scores: jax.Array) -> jax.Array:
        """The scores [R, C, N], with minus infinity outside the chosen groups."""
        config = self.config
        if config.num_chosen_groups == config.num_groups:
            return scores
        grouped = scores.reshape(*scores.shape[:2], config.num_groups, -1)
        group_scores = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
        chosen = highest(group_scores, config.num_chosen_groups)
        return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


class Matrices(nnx.Module):
    """The matrices of all experts, stacked. In a checkpoint each matrix is a separate tensor."""

    def __init__(self, shape: tuple[int, int, int], dtype, rngs: nnx.Rngs):
        self.kernel = random_matrices(rngs, shape, dtype)


class Experts(nnx.Module):
    """Gated MLPs.

    A family with other experts overrides `_arrays`, arrays [N, ...], and `_output`, which gets the slices of an expert.
    """

    def __init__(self, width: int, config: ExpertsConfig, dtype, rngs: nnx.Rngs):
        self.names = config.matrices
        inner = config.width
        for name, shape in zip(self.names, ((width, inner), (width, inner), (inner, width)), strict=True):
            setattr(self, name, Matrices((config.num_experts, *shape), dtype, rngs))

    def __call__(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """The sum f32[R, C, E] of all experts' outputs for x [R, C, E], weighted by `weights` f32[R, C, N]."""

        def add(total, expert):
            *arrays, weight = expert
            return total + weight[..., None] * self._output(x, *arrays), None

        # Experts run one after the other, so memory holds the inner activations of a single expert.
        total, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), (*self._arrays(), jnp.moveaxis(weights, -1, 0)))
        return total

    def _arrays(self) -> list[jax.Array]:
        return [getattr(self, name).kernel[...] for name in self.names]

    def _output(self, x: jax.Array, *arrays: jax.Array) -> jax.Array:
        gate, up, down = arrays
        inner = jax.nn.silu(jnp.dot(x, gate)) * jnp.dot(x, up)
        return jnp.dot(inner, down, preferred_element_type=jnp.float32)


class Mixture(nnx.Module):
    """Experts to choose from for each token, and perhaps a shared expert for all tokens."""

    def __init__(self, width: int, config: ExpertsConfig, dtype, rngs: nnx.Rngs):
        self.config = config
        self.gate = Router(width, config, dtype, rngs)
        self.experts = Experts(width, config, dtype, rngs)
        if config.shared_gate:
            self.shared_expert = MLP(width, config.shared_width, dtype, rngs)
            self.shared_expert_gate = nnx.Linear(width, 1, use_bias=False, param_dtype=dtype, rngs=rngs)
        elif config.shared_width:
            self.shared_experts = MLP(width, config.shared_width, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [R, C, E] to [R, C, E]."""
        y = self.experts(x, self.gate(x))
        if self.config.shared_gate:
            gate = jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32))
            y = y + gate * self.shared_expert(x).astype(jnp.float32)
        elif self.config.shared_width:
            y = y + self.shared_experts(x).astype(jnp.float32)
        return y.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer, and a token's choice among them.

    Attributes:
      num_experts: N.
      per_token: number of experts a token chooses.
      width: inner width of each expert.
      shared_width: inner width of the shared expert for all tokens; 0 disables it.
      shared_gate: whether a gate scales the shared expert's output.
      softmax: whether scores are a softmax over all experts, instead of separate sigmoids.
      corrected: whether a bias is added to the scores only for the choice.
      num_groups: number of equal groups; a token chooses from the `num_chosen_groups` groups with the highest sums of
        their best two scores.
      num_chosen_groups: at most num_groups.
      normalised: whether the chosen experts' weights add up to 1, before `factor`.
      factor: factor on the weights.
      name: the mixture's name in a layer and in checkpoints.
      matrices: names of an expert's matrices: the gate, the up and the down projection.
      module: class of the mixture, made from the stream's width, this config, a dtype and `nnx.Rngs`.
    """

    num_experts: int
    per_token: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    softmax: bool = False
    corrected: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    normalised: bool = True
    factor: float = 1.0
    name: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    module: ClassVar[type[Any]] = Mixture

    def check(self) -> ExpertsConfig:
        """Returns this config. Raises a ValueError if a token cannot choose this many experts or groups."""
        group_size = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or (self.num_groups > 1 and group_size < 2):
            wanted = f"a divisor of the {self.num_experts} experts, two to a group"
            raise ValueError(f"n_group: got {self.num_groups}, wanted {wanted}")
        if self.num_chosen_groups > self.num_groups:
            raise ValueError(f"topk_group: got {self.num_chosen_groups}, wanted at most n_group={self.num_groups}")
        max_experts = group_size * self.num_chosen_groups
        if self.per_token > max_experts:
            raise ValueError(f"num_experts_per_tok: got {self.per_token}, wanted at most {max_experts}")
        return self


def read_experts(hf: Mapping[str, Any], table: Table, num_shared: str, **options: Any) -> ExpertsConfig:
    """Reads the experts of a config.json.

    Args:
      hf: the fields, defaults included.
      table: the fields to read.
      num_shared: name of the field with the number of shared experts.
      options: fields of the `ExpertsConfig` fixed by the family.
    """
    values = read_table(hf, table)
    return ExpertsConfig(**values, shared_width=values["width"] * count(hf, num_shared), **options).check()


def write_experts(experts: ExpertsConfig, table: Table, num_shared: str) -> dict[str, Any]:
    """Writes the fields of a config.json for `read_experts`."""
    return {**write_table(experts, table), num_shared: experts.shared_width // experts.width}


def highest(scores: jax.Array, count: int) -> jax.Array:
    """Marks the `count` highest scores [..., N] of the last axis, as bool[..., N]."""
    _, chosen = lax.top_k(scores, count)
    return jnp.any(jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.bool_), axis=-2)


def random_matrices(rngs: nnx.Rngs, shape: tuple[int, ...], dtype) -> nnx.Param:
    """Random matrices, scaled so products are as large as their inputs."""
    initial = nnx.initializers.lecun_normal(batch_axis=tuple(range(len(shape) - 2)))
    return nnx.Param(initial(rngs.params(), shape, dtype))
