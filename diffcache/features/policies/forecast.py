"""Forecast, our default: the whole model's output, extrapolated linearly in sigma over a table of
computed steps, with the truth at every computed step fed back.

Source: own. The polynomial is TaylorSeer's (arXiv 2503.06923) at order 1. Ours are the tables,
found by a search on full runs and laid on any schedule over sigma (schedule.py, tables.py; another
solver gets an analytic table, closer together early in the run), and the closed loop: what the
predictions over a gap got wrong is paid back by the computed output after it (correction.py), an
extrapolation that proves worse than holding is not used, and gaps are halved while the last
prediction was no better than nothing.
Defaults: 40 % of the steps, 3 warm-up steps and the last one computed.
"""

from ...policy import Policy
from ...registry import register
from ..guards import Guards
from ..predictors import BestOrder
from ..sites import Model
from ..tables import SigmaTable


@register
def forecast() -> Policy:
    return Policy(
        name="forecast",
        summary="extrapolate the model's output in sigma, correct it at each computed step",
        source="own",
        site=Model(form="output"),
        gate=SigmaTable(fraction=0.4, growth=1.3),
        predictor=BestOrder(max_order=1, max_gain=16.0, correct=True),
        guards=Guards(warmup_steps=3, tail_steps=1),
        exact={"fraction": 1.0},
    )
