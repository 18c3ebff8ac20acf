"""What the oracle reads off a clip of the demo model, for `diffcache bench demo --judge`.

diffcache bench demo --prompts samples/prompts/held-out.txt --judge samples.judge:attributes
"""

from typing import Any

import numpy as np
import torch

from samples.train.oracle import read


def attributes(frames: np.ndarray[Any, Any], prompt: str) -> dict[str, Any]:
    """Colour, shape and direction of each thing, and the background, seen in a clip.

    Args:
        frames: [17, 64, 64, 3] in [0, 1].
        prompt: what the clip should show; not looked at.
    """
    reading = read(torch.from_numpy(frames).float().permute(0, 3, 1, 2))
    # By colour, as two things of one size may swap places.
    return {"things": sorted(map(str, reading.things)), "background": reading.background}
