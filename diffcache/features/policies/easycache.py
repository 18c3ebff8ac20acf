"""EasyCache: the change of the latents, scaled by an online rate, is summed until it reaches a
threshold.

Source: EasyCache, arXiv 2507.02860.
Published defaults (Wan 2.1): threshold 0.05, 10 warm-up steps, the last step computed. The cached
tensor is output minus latents.
Differs: each branch decides for itself; the published code lets the unconditional one follow.
"""

from ...policy import Policy
from ...registry import register
from ..gates import Accumulate
from ..guards import Guards
from ..metrics import RateScaled
from ..predictors import Hold
from ..probes import SiteInput
from ..sites import Model


@register
def easycache() -> Policy:
    return Policy(
        name="easycache",
        summary="reuse output minus latents while the predicted change stays small",
        source="arXiv 2507.02860",
        site=Model(form="residual"),
        probe=SiteInput(),
        metric=RateScaled(),
        gate=Accumulate(threshold=0.05),
        predictor=Hold(),
        guards=Guards(warmup_steps=10, tail_steps=1),
        exact={"threshold": 0.0},
    )
