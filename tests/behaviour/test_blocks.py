"""What a user sees of the blocks: counts that do not fit, arguments nobody foresaw."""

from __future__ import annotations

import pytest
import torch
from toys import COND, Bare, drive, latents, reused

import diffcache


@pytest.mark.peer_row(25)
def test_arguments_that_are_not_known_reach_the_forward():
    """ComfyUI-TeaCache #118: broke with each update of the host (a new `control` argument).

    No forward was copied: new keyword arguments pass through, at computed and kept steps.
    """
    module, plain = diffcache.wrap(Bare(), "hold", site="stack"), Bare()
    call = {"cond": COND, "control": torch.full((1, 5, 6), 0.5), "brand_new": object()}
    assert torch.equal(module(latents(), 1000.0, **call), plain(latents(), 1000.0, **call))
    drive(module, lambda step: [call])
    assert reused(module) > 0


@pytest.mark.parametrize(
    "site",
    [
        {"kind": "stack", "front": 2, "back": 1},
        {"kind": "stack", "front": 3},
        {"kind": "span", "start": 2, "end": 9},
        {"kind": "block", "anchor": 3},
    ],
)
def test_more_blocks_than_there_are_is_an_error_at_wrap(site, tiny_wan, run_tiny):
    """Told at once, with the number of blocks; the pipeline stays as it was."""
    pipe = tiny_wan()
    with pytest.raises(ValueError, match="3"):
        diffcache.wrap(pipe, "hold", site=site)
    assert "forward" not in pipe.transformer.__dict__
    assert torch.equal(run_tiny(pipe), run_tiny(tiny_wan()))


def test_every_block_runs_at_most_once(tiny_wan, run_tiny):
    """Once the structure is known, no front and back make a block run twice."""
    for front, back in ((0, 0), (1, 1), (2, 0), (0, 2)):
        site = {"kind": "stack", "front": front, "back": back}
        pipe = diffcache.wrap(tiny_wan(), "hold", site=site)
        run_tiny(pipe)
        counts = [0, 0, 0]
        for i, block in enumerate(pipe.transformer.blocks):
            block.register_forward_hook(
                lambda *_, i=i, counts=counts: counts.__setitem__(i, counts[i] + 1)
            )
        run_tiny(pipe)
        skipped = reused(pipe)
        expected = [24 - skipped if front <= i < 3 - back else 24 for i in range(3)]
        assert skipped > 0 and counts == expected
