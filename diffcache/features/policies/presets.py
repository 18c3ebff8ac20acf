"""The presets: `forecast` at three costs. Measured figures are in the README.

`fraction` is meant for 50 steps; shorter runs compute more of their steps (see `SigmaTable`), so a
preset keeps its quality, not its speed-up, from one length of run to another.
"""

from dataclasses import replace

from ...policy import Policy
from ...registry import register
from .forecast import forecast


def _preset(name: str, fraction: float, summary: str) -> Policy:
    policy = forecast().with_settings(fraction=fraction, reference_steps=50)
    return replace(policy, name=name, summary=summary)


@register
def exact() -> Policy:
    return _preset("exact", 1.0, "only lossless savings: every step is computed")


@register
def quality() -> Policy:
    return _preset("quality", 0.42, "forecast, 21 of 50 steps computed")


@register
def balanced() -> Policy:
    return _preset("balanced", 0.28, "forecast, 14 of 50 steps computed")


@register
def fast() -> Policy:
    return _preset("fast", 0.22, "forecast, 11 of 50 steps computed")
