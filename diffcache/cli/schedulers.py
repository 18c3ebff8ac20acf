"""Exchanges a pipeline's scheduler for another one by a short name."""

from math import inf
from typing import Any

from ..parts import near

# By name: the class for flow matching, and the one for noise prediction.
CLASSES = {
    "unipc": ("UniPCMultistepScheduler", "UniPCMultistepScheduler"),
    "dpm": ("DPMSolverMultistepScheduler", "DPMSolverMultistepScheduler"),
    "euler": ("FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler"),
    "heun": ("FlowMatchHeunDiscreteScheduler", "HeunDiscreteScheduler"),
}


def check_scheduler(text: str) -> tuple[str, float | None]:
    """("unipc", 5.0) from "unipc@5", ("unipc", None) from "unipc".

    Raises:
        ValueError: unknown name (near matches are listed), or the shift is no positive number.
    """
    name, at, number = text.partition("@")
    if name not in CLASSES:
        raise ValueError(f"unknown scheduler {name!r}; {near(name, CLASSES)}")
    try:
        shift = float(number) if at else None
    except ValueError:
        shift = 0.0
    if shift is not None and not 0 < shift < inf:
        raise ValueError(f"a shift is a positive number, as in unipc@5, got {text!r}")
    return name, shift


def use_scheduler(pipe: Any, name: str) -> None:
    """Puts a scheduler of that name on the pipeline, with the shift of the one it had.

    Args:
        name: "unipc", or "unipc@5" for another shift.

    Raises:
        ValueError: unknown name, the pipeline has no scheduler, or a shift for one without a flow.
    """
    name, shift = check_scheduler(name)
    old = getattr(pipe, "scheduler", None)
    if old is None:
        raise ValueError(f"{type(pipe).__name__} has no scheduler to exchange")
    import diffusers

    flow = is_flow(old)
    cls = getattr(diffusers, CLASSES[name][0 if flow else 1])
    if shift is not None and not flow:
        raise ValueError(f"{type(old).__name__} has no shift: write {name} alone")
    pipe.scheduler = _flow(cls, old.config, shift) if flow else cls.from_config(old.config)


def is_flow(scheduler: Any) -> bool:
    """Whether a scheduler integrates a flow (velocity) rather than predicted noise."""
    config = scheduler.config
    named = type(scheduler).__name__.startswith("FlowMatch")
    return named or config.get("prediction_type") == "flow_prediction"


def _flow(cls: Any, config: Any, shift: float | None) -> Any:
    """FlowMatch classes call the shift `shift`, the others `flow_shift`."""
    own = shift is None
    shift = shift or config.get("flow_shift") or config.get("shift") or 1.0
    if not cls.__name__.startswith("FlowMatch"):
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
        return cls.from_config(config, **flow)
    if "shift" in config:
        return cls.from_config(config) if own else cls.from_config(config, shift=shift)
    return cls(num_train_timesteps=config["num_train_timesteps"], shift=shift)
