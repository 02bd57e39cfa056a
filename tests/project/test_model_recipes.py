# SPDX-License-Identifier: Apache-2.0
"""The models of docs/tutorials/models compile nothing anew; their page generates with each."""

import importlib.util

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from kvjax.model import check_model
from tests.drive import ROOT


def recipe(name):
    """A new module from a file of docs/tutorials/models."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/tutorials/models/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def traces(*models):
    """The number of traces of a program that is called with one model after the other."""
    seen = []
    program = jax.jit(lambda model: seen.append(model) or jax.tree.leaves(model)[0])
    for model in models:
        program(model)
    return len(seen)


def test_a_plain_function_compiles_nothing_anew():
    plain, weights = recipe("plain_model"), {"embed": jnp.ones(2)}
    models = [plain.model_of(jax.tree.map(lambda x, n=number: n * x, weights)) for number in range(3)]
    check_model(models[0])
    assert traces(*models) == 1


def test_a_linen_recipe_made_again_compiles_nothing_anew():
    """Another module does: bound methods are compared by identity, even if flax finds the modules equal."""
    linen, params = recipe("linen_model"), {"weights": jnp.ones(2)}
    module, equal = linen.MODULE, linen.Model()
    check_model(linen.model_of(params))
    assert traces(*(linen.model_of(params) for _ in range(3))) == 1
    assert module == equal and traces(linen.model_of(params), Partial(equal.apply, params)) == 2
    assert traces(*(Partial(lambda params, *a, **k: module.apply(params, *a, **k), params) for _ in range(3))) == 3
