"""MagCache: the residual is reused while a curve measured before says its size hardly changes.

Source: MagCache, arXiv 2506.09045; curves and settings from Zehong-Ma/MagCache.
Published defaults (diffusers): threshold 0.06, at most 3 skips in a row, the first 0.2 of the steps
computed; with a model's curve come its own (Wan 2.1: 1.3B 0.12 and 4, 14B 0.24 and 6).
Differs: curves lie over the noise level and are interpolated at each call's, instead of by the
nearest index, so runs of any length and shift use the ratio over the gap passed; each branch, and
each expert of Wan 2.2, decides for itself. A model without a curve is refused by wrap;
`diffcache.magnitudes.measure(pipe, run)` makes one from a single full run.
The comparison is strict. The curve is fixed for all prompts; the report's errors are measured.
"""

from ...policy import Policy
from ...registry import register
from ..guards import Guards
from ..magnitudes import MagnitudeCurve
from ..predictors import Hold
from ..sites import Stack


@register
def magcache() -> Policy:
    return Policy(
        name="magcache",
        summary="reuse the stack's residual while its size, by a measured curve, stays the same",
        source="arXiv 2506.09045",
        site=Stack(),
        gate=MagnitudeCurve(),
        predictor=Hold(),
        guards=Guards(warmup_steps=1),
        exact={"threshold": 0.0},
    )
