"""The preset names. Until they are measured they stand for `forecast` at three costs."""

from dataclasses import replace

from ...policy import Policy
from ...registry import register
from .forecast import forecast


def _preset(name: str, fraction: float, summary: str) -> Policy:
    return replace(forecast().with_settings(fraction=fraction), name=name, summary=summary)


@register
def exact() -> Policy:
    return _preset("exact", 1.0, "only lossless savings: every step is computed")


@register
def quality() -> Policy:
    return _preset("quality", 0.5, "forecast, half of the steps computed")


@register
def balanced() -> Policy:
    return _preset("balanced", 0.4, "forecast, two fifths of the steps computed")


@register
def fast() -> Policy:
    return _preset("fast", 0.3, "forecast, three tenths of the steps computed")
