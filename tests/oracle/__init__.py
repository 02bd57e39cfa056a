# SPDX-License-Identifier: Apache-2.0

import sys

import jax

if sys.argv[0] == "-m":  # a machine is the program: its modules make arrays before its `main` runs
    jax.config.update("jax_num_cpu_devices", 8)
