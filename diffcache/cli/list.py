"""`diffcache list`: the registered policies."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .output import JsonFlag, show, table, to_json

if TYPE_CHECKING:
    from ..policy import Policy

PRESETS = ("exact", "quality", "balanced", "fast")


def list_policies(as_json: JsonFlag = False) -> None:
    """Lists the policies that `wrap` knows by name, and the presets.

    Every setting can be overridden: `diffcache.wrap(pipe, "first_block", threshold=0.08)`.
    """
    from ..registry import get_policy, policies

    known = [get_policy(name) for name in policies()]
    if as_json:
        print(to_json([_entry(policy) for policy in known]))
        return
    presets = sorted((p for p in known if p.name in PRESETS), key=lambda p: PRESETS.index(p.name))
    show(_table("Policies", [policy for policy in known if policy.name not in PRESETS]))
    show(_table("Presets", presets))


def _entry(policy: "Policy") -> dict[str, Any]:
    return {
        "name": policy.name,
        "summary": policy.summary,
        "composition": policy.describe(),
        "settings": policy.settings(),
        "exact": dict(policy.exact),
        "decides_per": policy.decides,
        "source": policy.source,
        "preset": policy.name in PRESETS,
    }


def _table(title: str, policies: list["Policy"]) -> Any:
    header = ["name", "what it does", "composition", "exact with", "source"]
    rows = [_cells(policy) for policy in policies]
    return table(title, header, rows, words=len(header), whole="name")


def _cells(policy: "Policy") -> list[str]:
    exact = ", ".join(f"{name}={value}" for name, value in policy.exact.items())
    parts = [*policy.describe().split(" . "), *_guards(policy)]
    return [policy.name, policy.summary, "\n".join(parts), exact, policy.source]


def _guards(policy: "Policy") -> list[str]:
    """["guards(warmup_steps=3)"], of the guards that are not as by default; empty without."""
    default, values = asdict(type(policy.guards)()), asdict(policy.guards)
    changed = [f"{name}={value}" for name, value in values.items() if value != default[name]]
    return [f"guards({', '.join(changed)})"] if changed else []
