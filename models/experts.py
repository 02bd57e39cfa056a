# SPDX-License-Identifier: Apache-2.0
"""The second half of a layer: a gated MLP, or a mixture of experts.

All experts are computed, and those that a token did not choose weigh zero. So shapes do not depend on the tokens. It
costs num_experts / per_token times the products that are needed.
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
    """The gated MLP, from the stream's width to an inner one and back."""

    def __init__(self, width: int, inner: int, dtype, rngs: nnx.Rngs, *, bias: bool = False, activation: str = "silu"):
        self.gate_proj = nnx.Linear(width, inner, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.up_proj = nnx.Linear(width, inner, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.down_proj = nnx.Linear(inner, width, use_bias=bias, param_dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """[R, C, E] to [R, C, E]."""
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class Router(nnx.Module):
    """The weights of all experts for each token; zero for those that it did not choose."""

    def __init__(self, width: int, config: ExpertsConfig, dtype, rngs: nnx.Rngs):
        self.config = config
        self.kernel = random_matrices(rngs, (width, config.num_experts), dtype)
        if config.corrected:
            self.e_score_correction_bias = nnx.Param(jnp.zeros(config.num_experts, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """f32[R, C, N] of x [R, C, E], in float32: rounding would change the choice."""
        config, wide = self.config, jnp.float32
        logits = jnp.dot(x.astype(wide), self.kernel[...].astype(wide), precision=lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits, axis=-1) if config.softmax else jax.nn.sigmoid(logits)
        for_choice = scores + self.e_score_correction_bias[...][None, None] if config.corrected else scores
        weights = jnp.where(highest(self._in_chosen_groups(for_choice), config.per_token), scores, 0)
        if config.normalised:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * config.factor

    def _in_chosen_groups(self, scores: jax.Array) -> jax.Array:
        """The scores [R, C, N]; minus infinity in groups that are not chosen."""
        config = self.config
        if config.num_chosen_groups == config.num_groups:
            return scores
        grouped = scores.reshape(*scores.shape[:2], config.num_groups, -1)
        of_groups = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
        chosen = highest(of_groups, config.num_chosen_groups)
        return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


class Matrices(nnx.Module):
    """A matrix of each expert; in a checkpoint each is a tensor of its own."""

    def __init__(self, shape: tuple[int, int, int], dtype, rngs: nnx.Rngs):
        self.kernel = random_matrices(rngs, shape, dtype)


class Experts(nnx.Module):
    """Gated MLPs; a family's own experts have other `_arrays` [N, ...], of which `_output` gets one expert's."""

    def __init__(self, width: int, config: ExpertsConfig, dtype, rngs: nnx.Rngs):
        self.names, inner = config.matrices, config.width
        for name, shape in zip(self.names, ((width, inner), (width, inner), (inner, width)), strict=True):
            setattr(self, name, Matrices((config.num_experts, *shape), dtype, rngs))

    def __call__(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """The weighted sum f32[R, C, E] of all experts' outputs, of x [R, C, E] and weights f32[R, C, N]."""

        def add(total, expert):
            *arrays, weight = expert
            return total + weight[..., None] * self._output(x, *arrays), None

        # One expert after the other, so that the inner activations of one are in memory at a time.
        total, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), (*self._arrays(), jnp.moveaxis(weights, -1, 0)))
        return total

    def _arrays(self) -> list[jax.Array]:
        return [getattr(self, name).kernel[...] for name in self.names]

    def _output(self, x: jax.Array, *arrays: jax.Array) -> jax.Array:
        gate, up, down = arrays
        inner = jax.nn.silu(jnp.dot(x, gate)) * jnp.dot(x, up)
        return jnp.dot(inner, down, preferred_element_type=jnp.float32)


class Mixture(nnx.Module):
    """Experts that each token chooses, and perhaps one that serves all tokens."""

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
        """[R, C, E] to [R, C, E]."""
        y = self.experts(x, self.gate(x))
        if self.config.shared_gate:
            gate = jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32))
            y = y + gate * self.shared_expert(x).astype(jnp.float32)
        elif self.config.shared_width:
            y = y + self.shared_experts(x).astype(jnp.float32)
        return y.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer, and how a token chooses some of them.

    Attributes:
      num_experts: N.
      per_token: how many a token chooses.
      width: inner width of each expert.
      shared_width: inner width of the expert that serves all tokens; 0: there is none.
      shared_gate: whether a gate scales the shared expert's output.
      softmax: whether scores are a softmax over all experts; else each is a sigmoid.
      corrected: whether a bias is added to the scores for the choice alone.
      num_groups: groups of equal size; a token chooses from `num_chosen_groups` of them, those whose best two experts
        have the highest sums.
      num_chosen_groups: at most num_groups.
      normalised: whether the chosen experts' weights add up to one, before `factor`.
      factor: on the weights.
      name: of the mixture in a layer, as in checkpoints.
      matrices: names of an expert's matrices: the gate's, the up and the down projection.
      module: class of the mixture, made of the stream's width, this config, a dtype and `nnx.Rngs`.
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
        """Returns itself; ValueError if a token cannot choose so many experts or groups."""
        group = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or (self.num_groups > 1 and group < 2):
            wanted = f"a divisor of the {self.num_experts} experts, two to a group"
            raise ValueError(f"n_group: got {self.num_groups}, wanted {wanted}")
        if self.num_chosen_groups > self.num_groups:
            raise ValueError(f"topk_group: got {self.num_chosen_groups}, wanted at most n_group={self.num_groups}")
        if self.per_token > group * self.num_chosen_groups:
            most = group * self.num_chosen_groups
            raise ValueError(f"num_experts_per_tok: got {self.per_token}, wanted at most {most}")
        return self


def read_experts(hf: Mapping[str, Any], table: Table, num_shared: str, **options: Any) -> ExpertsConfig:
    """The experts of a config.json, where `num_shared` names the field with the number of those that serve all tokens.

    `table` is that of the other fields, and `options` are the fields of an `ExpertsConfig` that the family fixes.
    """
    found = read_table(hf, table)
    return ExpertsConfig(**found, shared_width=found["width"] * count(hf, num_shared), **options).check()


def write_experts(experts: ExpertsConfig, table: Table, num_shared: str) -> dict[str, Any]:
    """The fields of a config.json that `read_experts` reads."""
    return {**write_table(experts, table), num_shared: experts.shared_width // experts.width}


def highest(scores: jax.Array, count: int) -> jax.Array:
    """bool, shaped like the scores [..., N]: whether each is among the `count` highest of the last axis."""
    _, chosen = lax.top_k(scores, count)
    return jnp.any(jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.bool_), axis=-2)


def random_matrices(rngs: nnx.Rngs, shape: tuple[int, ...], dtype) -> nnx.Param:
    """Matrices of random numbers whose products keep the scale of their inputs."""
    initial = nnx.initializers.lecun_normal(batch_axis=tuple(range(len(shape) - 2)))
    return nnx.Param(initial(rngs.params(), shape, dtype))
