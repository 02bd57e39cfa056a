# SPDX-License-Identifier: Apache-2.0
"""The packages of the extra `wires`."""

try:
    import msgspec
    import zmq
except ImportError as error:
    wanted = 'needs msgspec and pyzmq for vllm, and to read trtllm (pip install "kvjax[wires]")'
    raise ImportError(f"kvjax.interop: {wanted}") from error

__all__ = ["msgspec", "zmq"]
