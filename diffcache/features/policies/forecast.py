"""Forecast, our default: the whole model's output, extrapolated in sigma over a table of computed
steps, with the truth at every computed step fed back.

Source: own. The polynomial is TaylorSeer's (arXiv 2503.06923); the table, closer together early in
the run, and the two feedbacks are ours: the order that has been right is used next, and what the
predictions over a gap got wrong is paid back by the computed output after it (see correction.py).
Defaults: 40 % of the steps, 3 warm-up steps and the last one computed, and a step out of turn while
the observed error is above `max_error`.
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
        summary="extrapolate the model's output in sigma, correct it at each computed step",
        source="own",
        site=Model(form="output"),
        gate=Table(fraction=0.4, growth=1.3),
        predictor=BestOrder(max_order=2, correct=True),
        guards=Guards(warmup_steps=3, tail_steps=1, max_error=0.5),
        exact={"fraction": 1.0},
    )
