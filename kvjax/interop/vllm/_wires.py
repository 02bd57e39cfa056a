# SPDX-License-Identifier: Apache-2.0
"""The packages of the extra `wires`."""

try:
    import msgspec
    import zmq
except ImportError as error:
    raise ImportError('kvjax.interop.vllm: needs msgspec and pyzmq (pip install "kvjax[wires]")') from error

__all__ = ["msgspec", "zmq"]
