# SPDX-License-Identifier: Apache-2.0
"""Generation with the `Namespaces` that numbered its tenants. It refuses the numbers of others."""

import pytest

import kvjax
from tests import drive
from tests.serving_kit import HOST, MODEL, make_cache, prompts_of, spread, together

PROMPT = prompts_of(0)[0]


def streamed(*args, **options):
    return list(drive.stream(*args, **options))


@pytest.mark.parametrize("use", [kvjax.generate, streamed])
@pytest.mark.parametrize("host", [0, HOST])
def test_numbers_that_names_never_gave_out_are_refused_before_anything_is_donated(use, host):
    cache, names = make_cache(host=host), kvjax.Namespaces()
    names("tenant a")
    with pytest.raises(ValueError, match=r"^prompt 0: namespace: got 2, wanted one of 2 that names gave out"):
        use(MODEL, cache, [PROMPT], namespace=2, names=names)
    with pytest.raises(ValueError, match=r"^prompt 0: namespace: got -1, wanted an int of at least 0"):
        use(MODEL, cache, [PROMPT], namespace=[-1], names=names)
    with pytest.raises(ValueError, match=r"^prompt 1: namespace: got 2, .*; a saved cache needs the names"):
        use(MODEL, cache, [PROMPT, PROMPT], namespace=[1, 2], names=names)
    for wrong in ({"version": 1}, 3, names.to_dict()):
        with pytest.raises(ValueError, match=r"^names: got .*, wanted a kvjax\.Namespaces or None"):
            use(MODEL, cache, [PROMPT], names=wrong)
    kvjax.check(cache.state)
    assert "donated" not in repr(cache)


def test_tenants_find_their_own_prompts():
    cache, names = make_cache(), kvjax.Namespaces()
    spaces = [names("tenant a"), names("tenant b"), names("tenant a")]
    cached = []
    for space in spaces:
        (output,), cache, _ = together(cache, [PROMPT], namespace=space, names=names)
        cached.append(output.cached_tokens)
    (output,), *_ = spread(cache, [PROMPT], names=names)
    assert [*cached, output.cached_tokens] == [0, 0, 12, 0]
