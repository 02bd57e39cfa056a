# SPDX-License-Identifier: Apache-2.0
"""A gRPC service for a cache's contents, compatible with MAX's KV cache agent.

`agent.proto`, in the same folder, describes the service. gRPC generates `messages` and `services` from it.
"""

from kvjax.interop.agent.service import Agent, messages, services

__all__ = ["Agent", "messages", "services"]
