"""MemDecay: each kind of token fades at its own rate and is refreshed by attention.

Source: MemDecay. Its public text gives worth per region, exponential decay, refresh, pins and
pages dropped on overflow. Differs: single tokens go, not pages; the refresh is ours.
Roles are given with `diffcache.kv_roles`; tokens without one are of role 0.
"""

from ..budgets import Uniform
from ..named import register
from ..policy import KVPolicy
from ..scorers.role_decay import RoleDecay
from ..triggers import Overflow


@register
def MemDecay(
    keep: float = 0.5,
    worth: tuple[float, ...] = (1.0,),
    decay: tuple[float, ...] = (0.01,),
    slack: int = 16,
) -> KVPolicy:
    """Args: keep: fraction kept; worth, decay: by role; slack: tokens beyond the budget let be."""
    return KVPolicy(
        name="memdecay",
        summary="kinds of tokens fade with age and are refreshed by attention",
        source="MemDecay",
        scorer=RoleDecay(worth=worth, decay=decay),
        budget=Uniform(keep=keep),
        trigger=Overflow(slack=slack),
    )
