"""TaylorSeer: a polynomial forecast at fixed intervals.

Source: TaylorSeer, arXiv 2503.06923; diffusers' TaylorSeerCacheConfig.
Published defaults (diffusers): interval 5, 3 warm-up steps, order 1.
Differs: the polynomial runs over sigma (or the timestep), not over the step index, and goes
through the computed steps exactly; the stack's residual is forecast instead of every module's
output. Any site
works: `wrap(pipe, "taylorseer", site="model")`.
"""

from ...policy import Policy
from ...registry import register
from ..gates import Interval
from ..guards import Guards
from ..predictors import Polynomial
from ..sites import Stack


@register
def taylorseer() -> Policy:
    return Policy(
        name="taylorseer",
        summary="polynomial forecast of the stack at fixed intervals",
        source="arXiv 2503.06923",
        site=Stack(front=0),
        gate=Interval(interval=5),
        predictor=Polynomial(order=1),
        guards=Guards(warmup_steps=3),
        exact={"interval": 1},
    )
