# SPDX-License-Identifier: Apache-2.0
"""Caches with known contents, for the tests of views."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.debug.plots import plot_blocks
from tests.drive import PLAIN, TIERS, Driver


@functools.cache
def plain() -> Driver:
    """Rows 0 and 3 fork a prompt, row 1 shares its first block, row 2 is another tenant's. Two blocks are cached."""
    story = Driver(kvjax.init(PLAIN))
    prompt = [11, 12, 13, 14]
    story.start(0, [*prompt, 15, 16])
    story.start(1, [*prompt, 21, 22, 23, 24, 25])
    story.start(2, [*prompt, 31, 32, 33, 34, 35])
    story.do("release", 2)
    story.do("fork", 0, 3)
    story.start(2, [7, 7], namespace=3)
    assert story.grow(3, 0, 0, 0) == ["OK"] * 4
    return story


@functools.cache
def tiers() -> Driver:
    """Row 0 is longer than its window, row 1 is not yet written, row 2 is swapped out, row 3 is on its way to the host.

    Two texts are cached: a text which begins like row 0, with a part of its own, and a text on the host.
    """
    story = Driver(kvjax.init(TIERS))
    text = list(range(11, 30))
    story.start(0, text)
    story.start(1, [*text[:12], 77, 77, 77])
    story.do("release", 1)
    story.start(2, list(range(41, 60)))
    story.do("swap_out", 2)
    story.start(3, [81, 82, 83, 84, 85])
    story.do("swap_out", 3)
    story.do("release", 3)
    story.start(3, [91, 92, 93, 94, 95, 96])
    story.do("swap_out", 3, complete=False)
    assert story.admit(1, [7, 7], namespace=3) == ["OK"]
    return story


def changed(state, path, change):
    """The state with a field replaced by `change(numpy copy of it)`. `change` may write into the copy."""
    name, *rest = path.split(".")
    if isinstance(state, tuple) and not hasattr(state, "_fields"):
        at, rest = (int(name), rest) if name.isdigit() else (0, path.split("."))
        return (*state[:at], changed(state[at], ".".join(rest), change), *state[at + 1 :])
    old = getattr(state, name)
    if rest:
        new = changed(old, ".".join(rest), change)
    else:
        copy = np.array(old)
        result = change(copy)
        new = jnp.asarray(copy if result is None else result)
    return state._replace(**{name: new}) if hasattr(state, "_replace") else dataclasses.replace(state, **{name: new})


def at(index, value):
    def change(array):
        array[index] = value

    return change


def pixels(state, path, **options):
    from matplotlib.image import imread

    plot_blocks(state, path, **options)
    return imread(path)[..., :3]


def has_colour(picture, colour) -> bool:
    from matplotlib.colors import to_rgb

    return bool((np.abs(picture - np.array(to_rgb(colour))).max(axis=-1) < 0.02).any())
