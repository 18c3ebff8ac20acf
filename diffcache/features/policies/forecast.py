"""Forecast, our default: the whole model's output, extrapolated in sigma over a table of computed
steps.

Source: own measurements; the ingredients are TaylorSeer's polynomial (arXiv 2503.06923) and a
closed loop: at every computed step all orders are compared with the truth, the one that has been
right is used next, and a step is computed out of turn while the observed error is above
`max_error`.
Defaults: 40 % of the steps, 3 warm-up steps and the last one computed.
"""

from ...policy import Policy
from ...registry import register
from ..gates import Table
from ..guards import Guards
from ..predictors import BestOrder
from ..sites import Model


@register
def forecast() -> Policy:
    return Policy(
        name="forecast",
        summary="extrapolate the model's output in sigma, order chosen by observed error",
        source="own",
        site=Model(form="output"),
        gate=Table(fraction=0.4),
        predictor=BestOrder(max_order=2),
        guards=Guards(warmup_steps=3, tail_steps=1, max_error=0.5),
        exact={"fraction": 1.0},
    )
