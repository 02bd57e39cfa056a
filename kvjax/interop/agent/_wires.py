# SPDX-License-Identifier: Apache-2.0
"""The packages of the extra `agent`, and the messages of `agent.proto`."""

try:
    import grpc
    import grpc_tools  # noqa: F401, which grpc makes messages with
    from google.protobuf.message import DecodeError
except ImportError as error:
    raise ImportError(
        'kvjax.interop.agent: needs grpcio, grpcio-tools and protobuf (pip install "kvjax[agent]")'
    ) from error

messages, services = grpc.protos_and_services("kvjax/interop/agent/agent.proto")

__all__ = ["DecodeError", "grpc", "messages", "services"]
