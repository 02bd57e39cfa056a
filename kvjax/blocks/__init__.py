# SPDX-License-Identifier: Apache-2.0
"""The parts of verbs: finding, taking, holding and publishing the blocks of a group.

Each function decides first and then writes with masked scatters, in an order that lets XLA update in place.
"""
