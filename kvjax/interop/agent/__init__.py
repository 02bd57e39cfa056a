# SPDX-License-Identifier: Apache-2.0
"""A gRPC service of a cache's contents, in the manner of MAX's KV cache agent.

The service is described in `agent.proto` beside this file; `messages` and `services` are what gRPC makes of it.
"""

from kvjax.interop.agent.service import Agent, messages, services

__all__ = ["Agent", "messages", "services"]
