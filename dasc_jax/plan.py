"""Selection plans: which units of the recurrent state a prefix-cache checkpoint keeps.

Section 4.1 of the DASC paper: a unit is *global* and kept iff its static horizon exceeds `w_max`
tokens, otherwise it is *local* and left out. A plan is a host value made once, before serving; its
`id` stands for it everywhere else.
"""

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32

from dasc_jax.horizons import EPSILON, GATE_INPUT, check_horizons

RANDOM_SEEDS = (1234, 2027, 3407, 4519, 5683)
"""Seeds of the count-matched random masks of the paper (appendix C.3)."""

MIN_WINDOW = 4
_FORMAT = "dasc_jax.plan/1"


class PlanError(ValueError):
    """A plan that cannot be made, read, or used with these weights."""


@dataclasses.dataclass(frozen=True, eq=False)
class SelectionPlan:
    """A static selection; equal and hashed by `id`, so it can be a static argument of `jax.jit`.

    `retained` holds one read-only bool array per recurrent layer, [H] (GDN) or [H, K] (KDA).
    `window` tokens are replayed to refresh local units (section 4.2); 0 when nothing is local.
    `fingerprint` identifies the decay weights by the horizons they gave.
    """

    retained: tuple[Bool[np.ndarray, "H *K"], ...]
    w_max: int
    eps: float
    a: float
    window: int
    fingerprint: str

    @property
    def kind(self) -> Literal["kda", "gdn"]:
        """The decay granularity that the masks have."""
        return "kda" if self.retained[0].ndim == 2 else "gdn"

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """(H, K) or (H,): how the units of a layer are indexed."""
        return self.retained[0].shape

    @property
    def layers(self) -> int:
        """Recurrent layers."""
        return len(self.retained)

    @cached_property
    def units(self) -> int:
        """Units of the whole model, retained or not: the sum of n_l."""
        return sum(mask.size for mask in self.retained)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """r_l: retained units of every layer."""
        return tuple(int(mask.sum()) for mask in self.retained)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """o_l: layer l owns packed rows [o_l, o_{l+1}); L + 1 entries, the last one is `total`."""
        return (0, *(int(n) for n in np.cumsum(self.counts)))

    @property
    def total(self) -> int:
        """R: retained units of the whole model, the rows of a packed checkpoint."""
        return self.offsets[-1]

    @property
    def exact(self) -> bool:
        """Whether nothing is dropped, so that a load gives back the state itself."""
        return self.total == self.units

    @cached_property
    def index(self) -> Int32[np.ndarray, "R"]:
        """Flat unit number, layer-major, of every packed row: the table of a pack."""
        return _frozen(np.flatnonzero(np.concatenate([m.ravel() for m in self.retained])), np.int32)

    @cached_property
    def inverse(self) -> Int32[np.ndarray, "U"]:
        """Packed row of every unit, -1 for a dropped one: the table of an unpack."""
        table = np.full(self.units, -1, np.int32)
        table[self.index] = np.arange(self.total)
        return _frozen(table, np.int32)

    def mask(self, layer: int, key_dim: int = 1) -> Bool[np.ndarray, "H K"]:
        """Retained units of recurrent layer number `layer` as [H, K].

        GDN heads are repeated over `key_dim` columns (1 still broadcasts); KDA ignores it.
        """
        mask = self.retained[layer]
        return mask if mask.ndim == 2 else np.repeat(mask[:, None], key_dim, axis=1)

    @cached_property
    def id(self) -> str:
        """32 hex digits over the masks, w_max, eps, a, the window and the weight fingerprint."""
        numbers = (self.w_max, self.eps, self.a, self.window)
        head = json.dumps([self.kind, self.unit_shape, *numbers, self.fingerprint])
        digest = hashlib.blake2b(head.encode(), digest_size=16)
        for mask in self.retained:
            digest.update(np.packbits(mask).tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SelectionPlan) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return (
            f"SelectionPlan({self.kind}, w_max={self.w_max}, retained={self.total}/{self.units},"
            f" window={self.window}, id={self.id[:8]})"
        )

    def save(self, path: str | Path) -> None:
        """Writes the plan to `path` (numpy's zip format), replacing what is there in one step."""
        names = ("w_max", "eps", "a", "window", "fingerprint", "id")
        head = {"format": _FORMAT, **{name: getattr(self, name) for name in names}}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        with partial.open("wb") as file:
            np.savez_compressed(
                file, head=np.array(json.dumps(head)), retained=np.stack(self.retained)
            )
        partial.replace(path)


def make_plan(
    h: Sequence[np.ndarray], w_max: int, eps: float = EPSILON, a: float = GATE_INPUT
) -> SelectionPlan:
    """Keeps unit u iff H_s(u) > `w_max` tokens (section 4.1); 0 keeps all of them.

    `h`: horizons of every recurrent layer ([H] or [H, K]) as `retention_horizons` gives them for
    this `eps` and `a`. Raises HorizonError (unusable horizons) or PlanError (w_max no integer >=
    0).
    """
    layers = check_horizons(h)
    _check_w_max(w_max)
    return _plan(layers, [x > w_max for x in layers], w_max, eps, a)


def random_plan(
    h: Sequence[np.ndarray], w_max: int, seed: int, eps: float = EPSILON, a: float = GATE_INPUT
) -> SelectionPlan:
    """The control of the paper: as many units per layer as `make_plan` keeps, chosen uniformly."""
    layers = check_horizons(h)
    _check_w_max(w_max)
    masks = []
    for number, x in enumerate(layers):
        mask = np.zeros(x.size, bool)
        keep = int((x > w_max).sum())
        mask[np.random.default_rng([seed, number]).permutation(x.size)[:keep]] = True
        masks.append(mask.reshape(x.shape))
    return _plan(layers, masks, w_max, eps, a)


def load_plan(path: str | Path, h: Sequence[np.ndarray] | None = None) -> SelectionPlan:
    """Reads what `SelectionPlan.save` wrote.

    With `h`, the horizons of the weights it will serve, a plan of other weights (or of another eps
    or a) is refused. Raises PlanError for that, and for a file that is no intact plan.
    """
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            head, retained = json.loads(str(file["head"])), file["retained"]
        if head.pop("format") != _FORMAT or retained.dtype != bool or retained.ndim not in (2, 3):
            raise PlanError(f"{path} is not a plan of format {_FORMAT}")
        stored = head.pop("id")
        plan = SelectionPlan(retained=tuple(_frozen(m, bool) for m in retained), **head)
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} is not a readable plan: {error}") from None
    except ValueError as error:
        raise error if isinstance(error, PlanError) else PlanError(f"{path}: {error}") from None
    if plan.id != stored:
        raise PlanError(f"{path} is damaged: its contents have id {plan.id}, it says {stored}")
    if h is not None:
        check_plan(plan, h, str(path))
    return plan


def check_plan(plan: SelectionPlan, h: Sequence[np.ndarray], name: str = "plan") -> None:
    """Raises PlanError unless `plan` was made from weights with horizons `h`."""
    layers = check_horizons(h)
    if (plan.layers, plan.unit_shape) != (len(layers), layers[0].shape):
        raise PlanError(
            f"{name} selects from {plan.layers} layers of units {plan.unit_shape},"
            f" the weights have {len(layers)} of {layers[0].shape}"
        )
    if plan.fingerprint != (found := _fingerprint(layers)):
        raise PlanError(
            f"{name} was made from other decay weights, or at another eps or a than eps={plan.eps},"
            f" a={plan.a}: fingerprint {plan.fingerprint}, these weights have {found}"
        )


def refresh_window(
    h: Sequence[np.ndarray], retained: Sequence[Bool[np.ndarray, "H *K"]], w_max: int
) -> int:
    """Tokens whose replay refreshes every local unit (section 4.2); 0 when nothing is local.

    The longest local horizon, rounded up to a power of two and clamped to [4, w_max].
    """
    local = np.concatenate([x[~mask] for x, mask in zip(h, retained, strict=True)])
    if not local.size:
        return 0
    return int(min(max(np.exp2(np.ceil(np.log2(local.max()))), MIN_WINDOW), w_max))


def _plan(
    h: Sequence[np.ndarray], masks: Sequence[np.ndarray], w_max: int, eps: float, a: float
) -> SelectionPlan:
    window = refresh_window(h, masks, w_max)
    frozen = tuple(_frozen(mask, bool) for mask in masks)
    return SelectionPlan(frozen, int(w_max), float(eps), float(a), window, _fingerprint(h))


def _fingerprint(h: Sequence[np.ndarray]) -> str:
    """Hash of the horizons at float32: math libraries may differ in the last bit of a float64."""
    digest = hashlib.blake2b(digest_size=8)
    for x in h:
        digest.update(np.asarray(x, "<f4").tobytes())
    return digest.hexdigest()


def _check_w_max(w_max: int) -> None:
    if isinstance(w_max, bool) or not isinstance(w_max, int | np.integer) or w_max < 0:
        raise PlanError(f"w_max={w_max!r} must be an integer >= 0 (tokens; 0 keeps every unit)")


def _frozen(values: np.ndarray, dtype: type) -> np.ndarray:
    array = np.array(values, dtype)
    array.setflags(write=False)
    return array
