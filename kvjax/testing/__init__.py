# SPDX-License-Identifier: Apache-2.0
"""A conformance kit: random requests, and a cache that verifies itself.

    from kvjax.testing import check_policy
    check_policy(kvjax.by_score(lambda blocks: blocks.fill))

A failure is an AssertionError with the step and its request. The same seed gives the same requests again. Only
`requests`, a strategy for your own property tests, needs Hypothesis.
"""

from kvjax.testing.requests import SMALL, Request, random_requests, requests
from kvjax.testing.trial import Trial, check_policy, jitted_verbs

__all__ = ["SMALL", "Request", "Trial", "check_policy", "jitted_verbs", "random_requests", "requests"]
