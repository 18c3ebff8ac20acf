"""What a policy holds between calls, from shapes alone; how many steps a fixed table computes."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ..context import CallContext
from ..features.magnitudes import MagnitudeCurve
from ..features.probes import TimeSignal
from ..features.store import TensorStore
from ..policy import Policy
from .inspect_forward import Seen


def site_bytes(seen: Seen) -> dict[str, dict[str, int]]:
    """For each site that was seen: its regions, and bytes of one remembered step per branch."""
    found: dict[str, dict[str, int]] = {}
    if seen.outputs:
        found["model"] = {"regions": 1, "bytes": _bytes(seen.outputs)}
    if seen.contract is not None and seen.blocks:
        every = range(len(seen.blocks))
        for site, per_block in (("stack", False), ("block", True)):
            regions = seen.contract.regions(every, per_block)
            held = sum(_bytes(seen.blocks[region[-1]]) for region in regions)
            found[site] = {"regions": len(regions), "bytes": held}
    return found


def policy_bytes(seen: Seen, policy: Policy) -> int | None:
    """Bytes that the policy holds for one branch at most; None where the blocks were not seen.

    Raises:
        ValueError: the site asks for more blocks than there are.
    """
    if not seen.outputs or seen.latents is None:
        return None
    if not policy.site.blocks:
        cells = [(seen.outputs, seen.latents)]
    elif seen.contract is None:
        return None
    else:
        span = policy.site.span(len(seen.blocks))
        regions = seen.contract.regions(span, policy.site.per_block)
        cells = [(seen.blocks[region[-1]], seen.blocks[region[0]][0]) for region in regions]
    probed = cells if policy.site.per_block else cells[:1]
    held = sum(_history(policy, tensors) for tensors, _ in cells)
    return held + sum(_probed(policy, tensors, here) for tensors, here in probed)


def table_steps(policy: Policy, num_steps: int) -> int | None:
    """How many of `num_steps` are computed at least; None where the content alone decides."""
    if policy.metric is not None or isinstance(policy.gate, MagnitudeCurve):
        return None  # the curve lies over noise levels, which only a scheduler knows
    cell: Any = SimpleNamespace(
        policy=policy,
        history=[],
        numbers={},
        computed=0,
        reused=0,
        reuses_in_a_row=0,
        finite=lambda: True,
    )
    for step in range(num_steps):
        context = _step(step, num_steps)
        guarded = policy.guards.reason(context, cell) is not None
        if not guarded and policy.gate.reuse(context, None, cell):
            cell.reused, cell.reuses_in_a_row = cell.reused + 1, cell.reuses_in_a_row + 1
        else:
            cell.computed, cell.reuses_in_a_row, cell.history = cell.computed + 1, 0, [step]
    return cell.computed


def _step(step: int, num_steps: int) -> CallContext:
    """A step of a schedule whose noise levels nobody knows."""
    return CallContext(
        branch="cond",
        chunk=None,
        step=step,
        branch_step=step,
        timestep=float(num_steps - step),
        sigma=None,
        time=float(num_steps - step),
        pass_kind="denoise",
        num_steps=num_steps,
        new=None,
    )


def _history(policy: Policy, tensors: list[Tensor]) -> int:
    store = TensorStore(policy.store)
    return policy.predictor.depth * sum(store.nbytes(tensor) for tensor in tensors)


def _probed(policy: Policy, tensors: list[Tensor], here: Tensor) -> int:
    """What is kept of the probe, and whatever else the metric keeps."""
    if policy.probe is None or policy.metric is None:
        return 0
    kept = _Kept(policy)
    # Signals of the time alone are a few numbers, the modulated input is as large as the input.
    if isinstance(policy.probe, TimeSignal):
        fingerprint = here if policy.probe.signal == "input" else here.new_empty(0)
    else:
        fingerprint = policy.probe.fingerprint(here, here)
    kept.keep("reference", fingerprint)
    policy.metric.learn(fingerprint, tensors[0], kept)  # type: ignore[arg-type]
    return sum(kept.sizes.values())


class _Kept:
    """Stands in for a cell and only counts."""

    def __init__(self, policy: Policy) -> None:
        self.sizes: dict[str, int] = {}
        self.numbers: dict[str, float] = {}
        self._store = TensorStore(policy.store)

    def keep(self, name: str, tensor: Tensor) -> None:
        self.sizes[name] = self._store.nbytes(tensor)

    def kept(self, name: str, like: Tensor) -> None:
        return None


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
