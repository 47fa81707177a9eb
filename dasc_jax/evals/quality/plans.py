"""What a threshold keeps of every recurrent layer, and what random masks have in common with it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from dasc_jax.plan import make_plan, random_plan


def plan_rows(
    horizons: Sequence[Float64[np.ndarray, "H *K"]], w_max: int, seeds: Sequence[int]
) -> dict[str, Any]:
    """Units and retained units of every layer, and of all retained how many each mask keeps too."""
    plan = make_plan(horizons, w_max)
    masks = [random_plan(horizons, w_max, seed) for seed in seeds]
    return {
        "w_max": w_max,
        "window": plan.window,
        "units": [int(layer.size) for layer in plan.retained],
        "retained": [int(layer.sum()) for layer in plan.retained],
        "seeds": list(seeds),
        "shared": [
            int(sum((a & b).sum() for a, b in zip(plan.retained, mask.retained, strict=True)))
            for mask in masks
        ],
    }
