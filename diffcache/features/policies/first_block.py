"""First-block cache: the first block always runs; while what it adds hardly changes, the rest is
reused.

Source: ParaAttention's FBCache, as in diffusers' FirstBlockCacheConfig.
Published defaults: threshold 0.05 against the last computed step, no warm-up, no tail.
Differs: the comparison is strict, so threshold 0 is exact; a NaN computes.
"""

from ...policy import Policy
from ...registry import register
from ..gates import Threshold
from ..guards import Guards
from ..metrics import RelativeL1
from ..predictors import Hold
from ..probes import FrontResidual
from ..sites import Stack


@register
def first_block() -> Policy:
    return Policy(
        name="first_block",
        summary="reuse the stack's residual while the first block's stays alike",
        source="ParaAttention FBCache; diffusers",
        site=Stack(front=1),
        probe=FrontResidual(),
        metric=RelativeL1(),
        gate=Threshold(threshold=0.05),
        predictor=Hold(),
        guards=Guards(warmup_steps=1),
        exact={"threshold": 0.0},
    )
