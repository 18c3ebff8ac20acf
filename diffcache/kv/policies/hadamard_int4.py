"""Block-Hadamard INT4: every token stays, in four bits.

Source: token-wise asymmetric int4 after a Hadamard rotation of blocks, as in QuaRot, arXiv
2404.00456. The 32 newest tokens stay in full precision.
"""

from ..budgets import Uniform
from ..named import register
from ..policy import KVPolicy
from ..scorers.position import Position
from ..storages import Quantised


@register
def HadamardInt4(keep: float = 1.0, bits: int = 4, block: int = 64, tail: int = 32) -> KVPolicy:
    """Args: keep: fraction kept; bits, block, tail: of the storage."""
    return KVPolicy(
        name="hadamardint4",
        summary="every token in four bits after a Hadamard rotation, the newest in full",
        source="arXiv 2404.00456",
        scorer=Position(),
        budget=Uniform(keep=keep),
        storage=Quantised(bits=bits, block=block, tail=tail),
    )
