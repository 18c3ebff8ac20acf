"""`diffcache doctor`: is everything here that is needed, and what to do if not."""

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from . import demo_model_path
from .output import JsonFlag, show, table, to_json

OK, NOTE, PROBLEM = "ok", "note", "problem"
MARKS = {OK: "[green]ok[/]", NOTE: "[yellow]note[/]", PROBLEM: "[red]problem[/]"}

PACKAGES = {
    "diffusers": (PROBLEM, "pip install diffusers (video pipelines)"),
    "transformers": (PROBLEM, "pip install transformers (text encoders, multimodal LLMs)"),
    "accelerate": (PROBLEM, "pip install accelerate (diffusers needs it to load Wan)"),
    "triton": (NOTE, "optional, for GPU kernels: pip install triton"),
    "imageio-ffmpeg": (NOTE, "optional, for mp4 in the demo: pip install imageio-ffmpeg"),
    "stlpips-pytorch": (
        NOTE,
        "optional, for perceptual_distance: pip install --no-deps stlpips-pytorch",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` is empty where all is well."""

    what: str
    status: str
    found: str
    remedy: str = ""


def doctor(as_json: JsonFlag = False) -> None:
    """Checks the installation: versions, devices, threads, the demo model, known conflicts.

    Exit status 1 where something is missing that is needed.
    """
    findings = [_python(), *_torch(), *map(_package, PACKAGES), _kernels_folder(), _demo_model()]
    healthy = not any(finding.status == PROBLEM for finding in findings)
    if as_json:
        print(to_json({"healthy": healthy, "findings": [asdict(f) for f in findings]}))
    else:
        rows = [[f.what, MARKS[f.status], f.found, f.remedy] for f in findings]
        show(table("diffcache doctor", ["what", "", "found", "remedy"], rows, words=4))
    raise typer.Exit(0 if healthy else 1)


def _python() -> Finding:
    return Finding(
        "python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )


def _torch() -> list[Finding]:
    try:
        import torch
    except ImportError:
        return [Finding("torch", PROBLEM, "missing", "pip install torch")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    names += ["Apple GPU (mps)"] if torch.backends.mps.is_available() else []
    devices = ", ".join(names) or "CPU only (all of diffcache runs on it)"
    return [
        Finding("torch", OK, torch.__version__),
        Finding("devices", OK, devices),
        Finding("threads", OK, f"{torch.get_num_threads()} for one operation"),
    ]


def _package(name: str) -> Finding:
    try:
        return Finding(name, OK, version(name))
    except PackageNotFoundError:
        status, remedy = PACKAGES[name]
        return Finding(name, status, "missing", remedy)


def _kernels_folder() -> Finding:
    """An importable `kernels` package in the working folder breaks transformers."""
    what = "name clash 'kernels'"
    for folder in {Path.cwd(), Path(__file__).parents[2]}:
        marker = folder / "kernels" / "__init__.py"
        if marker.is_file():
            return Finding(what, PROBLEM, str(marker), "delete it: it breaks transformers")
    return Finding(what, OK, "none")


def _demo_model() -> Finding:
    try:
        path = demo_model_path()
    except FileNotFoundError as error:
        return Finding("demo model", PROBLEM, "missing", str(error))
    try:
        from .loading import load_pipeline

        pipe = load_pipeline(path, device="cpu")
    except Exception as error:  # whatever is wrong with it, it is a finding
        text = " ".join(str(error).split())[:200]
        return Finding("demo model", PROBLEM, f"does not load: {text}", "reinstall diffcache")
    size = sum(p.numel() for p in pipe.transformer.parameters()) / 1e6
    return Finding("demo model", OK, f"loads, {size:.1f} M parameters, {path}")
