"""Sites and probes: which blocks may be skipped, and what is compared."""

from __future__ import annotations

import pytest
import torch

from diffcache.features.probes import FrontResidual, SiteInput
from diffcache.features.sites import Block, Model, Span, Stack


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        (Stack(), range(0, 10)),
        (Stack(front=1), range(1, 10)),
        (Stack(front=2, back=3), range(2, 7)),
        (Span(), range(1, 9)),
        (Span(start=3, end=5), range(3, 5)),
        (Span(start=0, end=10), range(0, 10)),
        (Span(start=4, end=-2), range(4, 8)),
        (Block(), range(1, 10)),
        (Block(anchor=0), range(0, 10)),
        (Block(anchor=4), range(4, 10)),
    ],
)
def test_span_of_ten_blocks(site, expected):
    """By hand, out of ten."""
    assert site.span(10) == expected


BELOW = "front + back must be below the number of blocks (2)"


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (Stack(front=1, back=1), f"{BELOW}, got 2: give fewer, as in front=1, back=0"),
        (Stack(front=3), f"{BELOW}, got 3: give fewer, as in front=1, back=0"),
        (Span(start=1, end=1), "span must lie within the 2 blocks, got start 1, end 1"),
        (Span(start=0, end=3), "span must lie within the 2 blocks, got start 0, end 3"),
        (Span(start=0, end=-3), "span must lie within the 2 blocks, got start 0, end -3"),
        (Block(anchor=2), "anchor must be below the number of blocks (2), got 2"),
    ],
)
def test_span_that_does_not_fit(site, message):
    """The message names the settings and the number of blocks."""
    with pytest.raises(ValueError) as caught:
        site.span(2)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stack(front=-1), "front must be at least 0, got -1"),
        (lambda: Stack(back=-1), "back must be at least 0, got -1"),
        (lambda: Span(start=-1), "start must be at least 0, got -1"),
        (lambda: Block(anchor=-1), "anchor must be at least 0, got -1"),
        (lambda: Model(form="latent"), "form must be 'output' or 'residual', got 'latent'"),
    ],
)
def test_settings_are_checked(make, message):
    """The message names the setting, the bounds and what was given."""
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_probes_by_hand():
    """The input itself, or what the front blocks added to it."""
    entry, here = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 5.0])
    assert SiteInput().fingerprint(entry, here) is here
    assert torch.equal(FrontResidual().fingerprint(entry, here), torch.tensor([0.5, 3.0]))
