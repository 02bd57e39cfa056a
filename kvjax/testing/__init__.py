# SPDX-License-Identifier: Apache-2.0
"""A conformance kit: checks of models and policies, requests, and a self-verifying cache.

    from kvjax.testing import check_policy
    check_policy(kvjax.by_score(lambda blocks: blocks.fill))

A failure is an AssertionError with the step and its request. The same seed gives the same requests again. Only
`requests`, a strategy for your own property tests, needs Hypothesis.
"""

from kvjax.testing.model_trial import check_model
from kvjax.testing.policy_trial import check_policy
from kvjax.testing.requests import SMALL, Request, random_requests, requests
from kvjax.testing.trial import Trial, jitted_verbs

__all__ = ["SMALL", "Request", "Trial", "check_model", "check_policy", "jitted_verbs", "random_requests", "requests"]
