"""Trains the demo `WanTransformer3DModel` and its text encoder, by flow matching on encoded clips.

python -m samples.train.pool --vae /tmp/vae.pt --out /tmp/pool &
python -m samples.train.transformer --pool /tmp/pool --out /tmp/transformer.pt --minutes 60
"""

import argparse
import random
import time
from pathlib import Path

import torch
from torch import Tensor

from samples.train.model import Pair
from samples.train.optim import Average, Mixed, average_gradients, join_group, log, schedule
from samples.train.pool import Pool
from samples.train.text import LENGTHS, build_tokenizer, embed

LOGS = Path(__file__).parent / "logs"
SHIFT = 2.0


def draw_times(count: int) -> Tensor:
    """Noise levels [count] in (0, 1), evenly spread, then shifted as the sampler's are."""
    even = (torch.randperm(count) + torch.rand(count)) / count
    return SHIFT * even / (1 + (SHIFT - 1) * even)


def loss(pair: Pair, tokenizer: object, latents: Tensor, prompts: list[str]) -> Tensor:
    """Mean squared error of the predicted velocity, noise - latents."""
    lengths = torch.tensor(random.choices(LENGTHS, k=len(prompts)))
    text, pair.cross.bias = embed(pair.text, tokenizer, prompts, lengths)
    times, noise = draw_times(len(prompts)), torch.randn_like(latents)
    level = times[:, None, None, None, None]
    noisy = (1 - level) * latents + level * noise
    predicted = pair.transformer(noisy, (times * 1000).floor(), text, return_dict=False)[0]
    return (predicted - (noise - latents)).square().mean()


def save(
    path: Path, pair: Pair, average: Average, optimizer: Mixed, step: int, seconds: float
) -> None:
    """Write everything needed to go on, in one move."""
    state = {
        "average": average.weights,
        "average_steps": average.steps,
        "weights": pair.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "seconds": seconds,
    }
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def train(args: argparse.Namespace) -> None:
    rank, world = join_group()
    torch.manual_seed(0)
    pair, tokenizer, pool = Pair(), build_tokenizer(), Pool(args.pool)
    optimizer, average = Mixed(*pair.split(), muon=args.muon, adam=args.adam), Average(pair, 0.999)
    step = before = 0
    if args.out.exists():
        state = torch.load(args.out)
        pair.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        average.weights, average.steps = state["average"], state["average_steps"]
        step, before = state["step"], state["seconds"]
    random.seed(1000 * step + rank)
    torch.manual_seed(1000 * step + rank)
    if args.compile:
        for block in pair.transformer.blocks:
            block.compile(dynamic=False)
    parameters, recent = list(pair.parameters()), []
    start = time.time() - before
    elapsed, saved, total = before, before, args.minutes * 60
    while elapsed < total:
        if step % 50 == 0:
            pool.refresh()
        error = loss(pair, tokenizer, *pool.draw(args.batch))
        error.backward()
        elapsed = average_gradients(parameters, time.time() - start)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(schedule(elapsed, total, step=step, decay=args.decay))
        average.update(pair)
        recent.append(error.item())
        step += 1
        if rank == 0 and step % 50 == 0:
            log(
                args.log,
                start,
                step=step,
                loss=round(sum(recent) / 50, 4),
                clips=step * args.batch * world,
            )
            recent = []
        if rank == 0 and (elapsed - saved > 150 or elapsed >= total):
            save(args.out, pair, average, optimizer, step, elapsed)
            saved = elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pool", type=Path, required=True, help="folder of encoded clips, may still be growing"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="training goes on from this file if it exists"
    )
    parser.add_argument("--log", type=Path, default=LOGS / "transformer.jsonl")
    parser.add_argument("--minutes", type=float, default=60, help="in all, earlier runs included")
    parser.add_argument(
        "--decay", type=float, default=0.3, help="last share of the time, with a falling rate"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--muon", type=float, default=3.6e-3)
    parser.add_argument("--adam", type=float, default=1.2e-3)
    parser.add_argument(
        "--compile", action="store_true", help="compile the blocks: a minute, then 1.6x faster"
    )
    torch.set_num_threads(1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
