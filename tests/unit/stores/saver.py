# SPDX-License-Identifier: Apache-2.0
"""A process that saves two caches by turns, until it is killed."""

import pickle

import kvjax
from kvjax.stores import file, save


def run(folder, caches, ready):
    """Saves pickled caches to a folder, one after the other and again, in files of two blocks."""
    file.PART_BYTES = 256
    caches, names, number = pickle.loads(caches), kvjax.Namespaces(), 0
    while True:
        save(caches[number % len(caches)], folder, names=names, model="a model")
        number += 1
        if number == len(caches):
            ready.set()
