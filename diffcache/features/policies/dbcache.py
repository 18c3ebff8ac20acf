"""DBCache: the first blocks always run; while what they add hardly changes, the rest is reused.

Source: cache-dit's DBCache (vipshop/cache-dit).
Published defaults: 8 front blocks, no back blocks, threshold 0.08 against the last computed step,
8 warm-up steps, no bound on reuses.
Options: `mask=(1, 1, 0, ...)` with `static=True` or False for a mask of computed steps (SCM); a
forecast of the middle by `predictor={"kind": "polynomial", "order": 1}`; at most n reuses in a row
by `max_reuses=n`, in a run by `max_reused=n`.
Differs: a model of 8 blocks or fewer is refused by wrap, not at its first call; masks are laid over
other lengths of run by position, and warm-up holds under a mask too; the forecast runs over sigma.
The bound on the sum of all differences in a run is left out.
"""

from ...policy import Policy
from ...registry import register
from ..guards import Guards
from ..masks import MaskedThreshold
from ..metrics import RelativeL1
from ..predictors import Hold
from ..probes import FrontResidual
from ..sites import Stack


@register
def dbcache() -> Policy:
    return Policy(
        name="dbcache",
        summary="reuse the stack's residual while that of the first blocks stays alike",
        source="cache-dit DBCache",
        site=Stack(front=8, back=0),
        probe=FrontResidual(),
        metric=RelativeL1(),
        gate=MaskedThreshold(threshold=0.08),
        predictor=Hold(),
        guards=Guards(warmup_steps=8),
        exact={"threshold": 0.0},
    )
