"""Plain reuse over a static table: the baseline that every method has to beat.

Source: the idea is folklore; PAB (arXiv 2408.12588) and FORA (arXiv 2407.01425) publish interval
    tables.
Defaults: half of the steps, 3 warm-up steps, the last one computed.
Differs: the table is spread over the run that takes place, so no step count has to be announced.
"""

from ...policy import Policy
from ...registry import register
from ..gates import Table
from ..guards import Guards
from ..predictors import Hold
from ..sites import Model


@register
def hold() -> Policy:
    return Policy(
        name="hold",
        summary="reuse the last output over a static table",
        source="folklore",
        site=Model(form="output"),
        gate=Table(fraction=0.5),
        predictor=Hold(),
        guards=Guards(warmup_steps=3, tail_steps=1),
        exact={"fraction": 1.0},
    )
