"""Bytes: told, bounded, given back."""

from __future__ import annotations

import pytest
from toys import reused

import diffcache


@pytest.mark.peer_row(18)
@pytest.mark.peer_row(19)
def test_memory_is_told_bounded_and_given_back(tiny_wan, run_tiny):
    """WanVideoWrapper #341: out of memory once the cache was on; diffusers PR #13497: never freed.

    One latent for each branch is what `hold` needs; bf16 halves it; a bound holds.
    """
    latent = 4 * 2 * 8 * 8 * 4
    for settings, peak in (({}, 2 * latent), ({"dtype": "bfloat16"}, latent)):
        pipe = diffcache.wrap(tiny_wan(), "hold", **settings)
        run_tiny(pipe)
        summary = diffcache.report(pipe).summary
        assert summary["bytes_peak"] == peak and summary["bytes_held"] == 0
    pipe = diffcache.wrap(tiny_wan(), "hold", max_bytes=latent)
    run_tiny(pipe)
    assert diffcache.report(pipe).summary["bytes_peak"] == latent and reused(pipe) > 0
