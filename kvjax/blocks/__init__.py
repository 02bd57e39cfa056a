# SPDX-License-Identifier: Apache-2.0
"""The parts of verbs: finding, taking, holding and publishing the blocks of a group.

Each function first decides, and then writes with masked scatters, in an order in which XLA can update arrays in place.
"""
