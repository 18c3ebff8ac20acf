"""Exchanges a pipeline's scheduler for another one by a short name."""

from typing import Any

from ..features.base import near

# By name: the class for flow matching, and the one for noise prediction.
CLASSES = {
    "unipc": ("UniPCMultistepScheduler", "UniPCMultistepScheduler"),
    "dpm": ("DPMSolverMultistepScheduler", "DPMSolverMultistepScheduler"),
    "euler": ("FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler"),
    "heun": ("FlowMatchHeunDiscreteScheduler", "HeunDiscreteScheduler"),
}


def check_scheduler(name: str) -> None:
    """Raises ValueError, with near matches, for an unknown name."""
    if name not in CLASSES:
        raise ValueError(f"unknown scheduler {name!r}; {near(name, CLASSES)}")


def use_scheduler(pipe: Any, name: str) -> None:
    """Puts a scheduler of that name on the pipeline, with the shift of the one it had.

    Raises:
        ValueError: unknown name, or the pipeline has no scheduler.
    """
    check_scheduler(name)
    old = getattr(pipe, "scheduler", None)
    if old is None:
        raise ValueError(f"{type(pipe).__name__} has no scheduler to exchange")
    import diffusers

    flow = is_flow(old)
    cls = getattr(diffusers, CLASSES[name][0 if flow else 1])
    pipe.scheduler = _flow(cls, old.config) if flow else cls.from_config(old.config)


def is_flow(scheduler: Any) -> bool:
    """Whether a scheduler integrates a flow (velocity) rather than predicted noise."""
    config = scheduler.config
    named = type(scheduler).__name__.startswith("FlowMatch")
    return named or config.get("prediction_type") == "flow_prediction"


def _flow(cls: Any, config: Any) -> Any:
    """FlowMatch classes call the shift `shift`, the others `flow_shift`."""
    shift = config.get("flow_shift") or config.get("shift") or 1.0
    if not cls.__name__.startswith("FlowMatch"):
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
        return cls.from_config(config, **flow)
    if "shift" in config:
        return cls.from_config(config)
    return cls(num_train_timesteps=config["num_train_timesteps"], shift=shift)
