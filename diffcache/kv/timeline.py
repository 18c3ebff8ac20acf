"""What all layers of a cache share of every token ever seen: real or padding, position, role."""

from __future__ import annotations

import torch
from torch import Tensor

TABLES = ("real", "positions", "roles")


class Timeline:
    """Tables over columns: a column is a place in the batch's input, padding included.

    Attributes:
        real: bool [batch, columns].
        positions: int32 [axes, batch, columns], what tokens were rotated by: one axis or three.
        roles: int8 [batch, columns] or None where none were given.

    Eviction does not touch them, so positions stay true. They cost a few bytes per token for
    the whole model.
    """

    def __init__(self) -> None:
        self.padded = False  # whether there was padding in the last pass
        self.real: Tensor | None = None
        self.positions: Tensor | None = None
        self.roles: Tensor | None = None

    @property
    def columns(self) -> int:
        return 0 if self.real is None else self.real.shape[1]

    def extend(self, real: Tensor, positions: Tensor | None, roles: Tensor | None = None) -> None:
        """Adds columns.

        Args:
            real: bool [batch, new].
            positions: [batch or 1, new] or [axes, batch or 1, new]; None to count real tokens.
            roles: [batch, new] or None.
        """
        if positions is None:
            before = 0 if self.real is None else self.real.sum(1, keepdim=True)
            positions = (before + real.cumsum(1) - 1).clamp(min=0)
        positions = positions if positions.ndim == 3 else positions[None]
        positions = positions.to(torch.int32).expand(-1, real.shape[0], -1)
        self.padded = not bool(real.all())
        if self.roles is not None or roles is not None:
            old = torch.zeros(real.shape[0], self.columns, dtype=torch.int8, device=real.device)
            new = torch.zeros_like(real, dtype=torch.int8) if roles is None else roles
            old = old if self.roles is None else self.roles
            self.roles = torch.cat([old, new.to(old)], 1)
        self.real = _joined(self.real, real, 1)
        self.positions = _joined(self.positions, positions, 2)

    def seen(self) -> Tensor:
        """int64 [batch]: real tokens ever seen."""
        assert self.real is not None
        return self.real.sum(1)

    def truncate(self, columns: int) -> None:
        for name in TABLES:
            table = getattr(self, name)
            if table is not None and table.shape[-1] > columns:
                setattr(self, name, table[..., :columns].clone())

    def select(self, rows: Tensor) -> None:
        """Takes these rows of the batch, in this order."""
        for name in TABLES:
            table = getattr(self, name)
            if table is not None:
                setattr(self, name, table.index_select(table.ndim - 2, rows.to(table.device)))

    def clear(self) -> None:
        self.real = self.positions = self.roles = None

    def restore(self, tables: dict[str, Tensor]) -> None:
        """Takes the tables that `tensors` gave."""
        self.clear()
        for name, table in tables.items():
            setattr(self, name, table)

    def tensors(self) -> dict[str, Tensor]:
        tables = {name: getattr(self, name) for name in TABLES}
        return {name: table for name, table in tables.items() if table is not None}


def _joined(old: Tensor | None, new: Tensor, dim: int) -> Tensor:
    return new.contiguous().clone() if old is None else torch.cat([old, new], dim)
