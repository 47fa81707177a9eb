"""The arms of a quality study: which units checkpoints keep, in what form, and how a hit loads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dasc_jax.config import ConfigError, DascConfig
from dasc_jax.plan import RANDOM_SEEDS, SelectionPlan, make_plan, random_plan


@dataclass(frozen=True)
class Arm:
    """A policy, threshold and quantization, and who selects: the horizons or, as control, chance.

    `seed` numbers the count-matched mask of the selector "random", which keeps as many units of
    every layer as the horizons would (appendix C.3); it is None for "dasc". INT8 alone is policy
    "nr" with `w_max` 0: the policy "dense" stands for exact checkpoints.

    Raises:
        ConfigError: a seed without "random" or the reverse, "random" where every unit is kept, or
            "dense" quantized.
    """

    dasc: DascConfig
    selector: Literal["dasc", "random"] = "dasc"
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.selector == "random") != (self.seed is not None):
            raise ConfigError(f"selector={self.selector!r} with seed={self.seed}")
        if self.selector == "random" and not self.w_max:
            raise ConfigError("selector='random' needs a w_max that drops units: 0 keeps all")
        if self.dasc.policy == "dense" and self.dasc.quantization:
            raise ConfigError(
                "policy='dense' takes exact checkpoints only; int8 alone is policy='nr', w_max=0"
            )

    @property
    def w_max(self) -> int:
        """The threshold in tokens; 0 when everything is kept."""
        return 0 if self.dasc.policy == "dense" else self.dasc.w_max

    @property
    def name(self) -> str:
        """As tables call it: "dense", "nr W16", "wr W64 int8", "nr W16 random 1234"."""
        if self.dasc.policy == "dense":
            return "dense"
        words = [self.dasc.policy, f"W{self.w_max}", self.dasc.quantization]
        if self.selector == "random":
            words.append(f"random {self.seed}")
        return " ".join(word for word in words if word)

    def plan(self, horizons: Sequence[np.ndarray]) -> SelectionPlan:
        """The selection for weights of these horizons, taken at the arm's `eps` and `a`."""
        eps, a = self.dasc.eps, self.dasc.a
        if self.seed is not None:
            return random_plan(horizons, self.w_max, self.seed, eps, a)
        return make_plan(horizons, self.w_max, eps, a)


DENSE = Arm(DascConfig(w_max=0, policy="dense"))
"""Exact checkpoints: the reference of every comparison, and the form that others derive from."""


def random_arms(dasc: DascConfig, seeds: Sequence[int] = RANDOM_SEEDS) -> tuple[Arm, ...]:
    """The count-matched controls of `Arm(dasc)`, one for each mask seed."""
    return tuple(Arm(dasc, "random", seed) for seed in seeds)
