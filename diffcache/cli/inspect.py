"""`diffcache inspect`: what would be hooked in a pipeline, and what a policy would hold."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import JsonFlag, progress, show, size, table, to_json

if TYPE_CHECKING:
    from ..policy import Policy
    from .inspect_target import Source


def inspect(
    target: Annotated[
        str, typer.Argument(help="A pipeline folder, a class of diffusers, or: demo.")
    ],
    policy: Annotated[str, typer.Option(help="A policy's name or file.")] = "balanced",
    height: Annotated[int, typer.Option(min=8, help="Pixels.")] = 480,
    width: Annotated[int, typer.Option(min=8, help="Pixels.")] = 832,
    frames: Annotated[int, typer.Option(min=1, help="Frames of the clip.")] = 81,
    steps: Annotated[int, typer.Option(min=1, help="Solver steps.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """Shows denoisers, block lists, sites and memory; builds shapes only, reads no weights.

    Memory is in bfloat16 for one branch; guidance that runs the model twice has two.
    """
    from ..registry import get_policy
    from .inspect_target import find_sources

    chosen = get_policy(policy)
    sources = find_sources(target)
    found = []
    with progress() as bar:
        work = bar.add_task("inspecting", total=len(sources))
        for source in sources:
            found.append(_inspect(source, chosen, (height, width, frames), steps))
            bar.update(work, advance=1)
    if as_json:
        print(to_json({"target": target, "denoisers": found}))
        return
    for entry in found:
        _show(entry)


def _inspect(
    source: "Source", policy: "Policy", shape: tuple[int, int, int], steps: int
) -> dict[str, Any]:
    from ..pipelines.families import family
    from .inspect_forward import observe
    from .inspect_memory import policy_bytes, site_bytes, table_steps

    module = source.build()
    seen = observe(source, module, *shape)
    problem = seen.problem
    try:
        policy = policy.for_model(family(module, None, source.name))
        held = policy_bytes(seen, policy)
    except ValueError as error:
        held, problem = None, f"{policy.name}: {error}"
    halves = getattr(policy.gate, "halve_above", None) is not None
    return {
        "name": source.name,
        "class": source.cls.__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "block_lists": [
            {
                "path": found.path,
                "blocks": len(found),
                "class": type(next(found.blocks.children())).__name__,
            }
            for found in seen.lists
        ],
        "latents": None if seen.latents is None else list(seen.latents.shape),
        "latent_of": f"of {source.spatial}x{source.spatial} pixels, {source.temporal} frames each",
        "contract_observed": seen.contract is not None,
        "problem": problem,
        "sites": site_bytes(seen),
        "policy": {
            "name": policy.name,
            "composition": policy.describe(),
            "bytes_per_branch": held,
            "steps": steps,
            "computed": table_steps(policy, steps),
            "may_compute_more": policy.guards.max_error is not None or halves,
        },
    }


def _show(entry: dict[str, Any]) -> None:
    """One denoiser: what it is, its sites, and what the policy costs there."""
    millions = entry["parameters"] / 1e6
    count = f"{millions / 1e3:.2f} billion" if millions >= 1e3 else f"{millions:.1f} million"
    show(f"[bold]{entry['name']}[/]: {entry['class']}, {count} parameters")
    for found in entry["block_lists"]:
        show(f"  {found['path']}: {found['blocks']} x {found['class']}")
    if not entry["block_lists"]:
        show("  no list of repeated blocks: only the model site is available")
    if entry["latents"]:
        show(f"  noisy input {'x'.join(map(str, entry['latents']))} ({entry['latent_of']})")
    if entry["problem"]:
        show(f"  [yellow]not known:[/] {entry['problem']}")
    rows = [
        [name, str(site["regions"]), size(site["bytes"])] for name, site in entry["sites"].items()
    ]
    if rows:
        show(table("", ["site", "regions", "bytes of one kept step"], rows))
    policy = entry["policy"]
    computed = "as many steps as its rule asks for"
    if policy["computed"] is not None:
        least = "at least " if policy["may_compute_more"] else ""
        computed = f"{least}{policy['computed']} of {policy['steps']} steps"
    held = policy["bytes_per_branch"]
    memory = "memory not known" if held is None else f"holds {size(held)} per branch"
    show(f"  policy {policy['name']} ({policy['composition']})")
    show(f"  computes {computed}; {memory}")
