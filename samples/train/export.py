"""Writes the demo model as a diffusers folder in bfloat16, file by file in one move each.

python -m samples.train.export --vae /tmp/vae.pt --transformer /tmp/transformer.pt
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline

from samples.train.model import Pair
from samples.train.pool import load_vae, statistics
from samples.train.text import build_tokenizer
from samples.train.transformer import SHIFT

FOLDER = Path(__file__).parents[1] / "models" / "demo-wan"
DEMO = {
    "prompts": [
        "a red circle moving left on a grey background",
        "a yellow triangle moving right on a navy background",
        "a blue square moving up on a brown background",
        "a white ring moving down on a teal background",
        "a purple circle moving right on a black background",
        "a green square moving left on a grey background",
    ],
    "seeds": [0, 1, 2, 3, 4, 6],
    "height": 64,
    "width": 64,
    "num_frames": 17,
    "num_inference_steps": 50,
    "guidance_scale": 2.0,
}


def assemble(vae_path: Path, transformer_path: Path) -> WanPipeline:
    """The pipeline with the averaged weights, rounded to bfloat16."""
    vae = load_vae(vae_path)
    mean, std = statistics(vae, vae_path.with_suffix(".stats"))
    vae.register_to_config(latents_mean=mean.flatten().tolist(), latents_std=std.flatten().tolist())
    pair = Pair()
    pair.load_state_dict(torch.load(transformer_path)["average"])
    return WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=pair.text.to(torch.bfloat16),
        vae=vae.to(torch.bfloat16),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
        ),
        transformer=pair.transformer.to(torch.bfloat16),
    )


def rename_tokenizer(path: Path) -> None:
    """Name the tokenizer's class so that transformers 4 finds it as well as 5."""
    path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def write(pipe: WanPipeline, folder: Path) -> None:
    """Save beside the folder, then replace each file."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        pipe.save_pretrained(fresh)
        for name in ("model_index.json", "tokenizer/tokenizer_config.json"):
            rename_tokenizer(Path(fresh) / name)
        (Path(fresh) / "demo.json").write_text(json.dumps(DEMO, indent=2) + "\n")
        for source in filter(Path.is_file, sorted(Path(fresh).rglob("*"))):
            target = folder / source.relative_to(fresh)
            target.parent.mkdir(parents=True, exist_ok=True)
            source.chmod(0o644)
            source.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--transformer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    write(assemble(args.vae, args.transformer), args.folder)
    size = sum(f.stat().st_size for f in args.folder.rglob("*") if f.is_file())
    print(f"{args.folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
