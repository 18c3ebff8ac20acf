"""TeaCache: how far the output moves is read off the time signal by a fitted polynomial and summed.

Source: TeaCache, arXiv 2411.19108; polynomials, signals and thresholds from ali-vilab/TeaCache.
Published defaults: the first and the last step computed; threshold by model (Wan 2.1: 1.3B 0.05 to
0.08, 14B 0.14 to 0.2, image-to-video 0.13 to 0.3; FLUX 0.25 to 0.8; HunyuanVideo 0.1 to 0.15).
With Wan's retention steps: `signal="modulation", warmup_steps=5, tail_steps=0`.
Differs: a negative value of the polynomial counts as 0; runs of other lengths than the fitted one
are brought to its spacing; a model that nothing was published for gets no foreign polynomial: the
change of the modulated input itself is summed, and the report says so. The comparison is strict.
"""

from ...policy import Policy
from ...registry import register
from ..fitted import FittedAccumulate
from ..guards import Guards
from ..metrics import PreviousL1
from ..predictors import Hold
from ..probes import TimeSignal
from ..sites import Stack


@register
def teacache() -> Policy:
    return Policy(
        name="teacache",
        summary="reuse the stack's residual while the time signal, by a polynomial, moves little",
        source="arXiv 2411.19108",
        site=Stack(),
        probe=TimeSignal(),
        metric=PreviousL1(),
        gate=FittedAccumulate(),
        predictor=Hold(),
        guards=Guards(warmup_steps=1, tail_steps=1),
        exact={"threshold": 0.0},
    )
