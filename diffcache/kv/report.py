"""What a wrapped language model's last cache kept, and what it holds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class KVReport:
    """Of the cache that was used last.

    Attributes:
        rows: one mapping for each compression of a layer, in order: layer, columns seen, reason,
            tokens before and after (over rows and heads), bytes of the layer afterwards.
        summary: policy, its parts on one line, layers compressed and left alone, tokens seen,
            bytes held and what they would be in full, and notes.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"summary": self.summary, "rows": self.rows}, indent=1)

    def to_html(self, path: str | Path) -> None:
        """Writes one self-contained page: the summary and every compression."""
        from .. import page

        names = list(self.rows[0]) if self.rows else []
        head = "".join(f"<th>{page.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{page.escape(str(v))}</td>" for v in row.values()) + "</tr>"
            for row in self.rows
        )
        table = f"<table><tr>{head}</tr>{body}</table>"
        text = page.page("diffcache report", [f"<pre>{page.escape(str(self))}</pre>", table])
        Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        s = self.summary
        lines = [
            f"KV policy {s['policy']}: {s['parts']}",
            f"  {s['layers']} layers compressed, {s['left_alone']} left as they are",
            f"  {s['seen']:,} tokens seen, {s['compressions']} compressions",
            f"  {s['bytes_held']:,} bytes held of {s['bytes_full']:,} in full"
            f" ({s['share_held']:.1%})",
        ]
        return "\n".join(lines + [f"  note: {note}" for note in s["notes"]])

    __repr__ = __str__
