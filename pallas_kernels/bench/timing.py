"""What a benchmark measures: implementations of an op at a shape, and how near the floor they come.

A module `pallas_kernels/bench/<kernel>.py` has `cases() -> Iterator[Case]`, cheap to walk: arrays
are made only by `Case.make`, which runs when its turn comes.

    def cases():
        for batch in (1, 8, 32):
            yield Case("delta_decode", f"B={batch}", floor_ms(moved(batch)), partial(make, batch))

    def make(batch):
        inputs = dict(q=..., k=..., v=..., g=..., beta=..., pool=..., slots=..., layer=3)
        step = jax.jit(..., donate_argnums=0)            # (pool, q, ...) -> (pool, o)
        return Problem(
            inputs=inputs,
            expected=dict(o=..., state=...),             # of a reference, float32 or better
            tolerance=2e-3,
            runs={
                "ours": lambda: Run(step, (copy_of_pool, q, ...), carried=1, result=...),
                "ours[block=64]": lambda: Run(...),      # one a tiling
                "xla": lambda: Run(...),
            },
        )

Peers are added to `runs` by `pallas_kernels.bench.peers`, which reads `inputs` and `expected` by
the names it lists for each op. A run is checked against `expected` on its first call; only a run
that is right is timed.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

COPY_BYTES_PER_SECOND = 4.3e12
"""Bytes read plus written by a device-to-device copy on an H200 (measured)."""
MATRIX_FLOP_PER_SECOND = 790e12
"""bf16 matrix product on random data on an H200 (measured)."""


def floor_ms(moved_bytes: int | float, flop: int | float = 0.0) -> float:
    """Least milliseconds on an H200: bytes at its copy rate or FLOP at its matrix rate, the larger.

    `moved_bytes` counts every input once and every output once.
    """
    return 1e3 * max(moved_bytes / COPY_BYTES_PER_SECOND, flop / MATRIX_FLOP_PER_SECOND)


@dataclass(frozen=True)
class Run:
    """One implementation with its arguments on the device, ready to be called many times.

    `call(*args)` launches and returns. If `carried` is n > 0 it consumes its first n arguments
    (donated pools) and returns a tuple that starts with their successors, which the next call gets
    in their place. Arrays that are donated belong to this run alone: copy what other runs share.
    `result` picks from the value of the first call what `Problem.expected` describes; it runs
    outside the timing.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    carried: int = 0
    result: Callable[[Any], Any] = field(default=lambda out: out)
    framework: str = "jax"
    """Or "torch": whose cache flush, whose way to wait."""
    tolerance: float | None = None
    """Where this run rounds more than the problem's tolerance allows."""

    def step(self) -> tuple[Any, "Run"]:
        """One call: its value, and the run that makes the next call."""
        out = self.call(*self.args)
        if not self.carried:
            return out, self
        return out, replace(self, args=(*out[: self.carried], *self.args[self.carried :]))


@dataclass(frozen=True)
class Problem:
    """The data of a case: named inputs for peers, the right answer, and who is timed.

    `expected` is an array, or a dict of arrays by output name; a run's `result` has its shape, or
    leaves out names that it does not compute. `tolerance` bounds the largest relative error of
    them, ||result - expected|| / ||expected||; 0 asks for the same bits. `runs` are made one by
    one, so that only one holds its own copy of a pool at a time. "ours" is the default tiling,
    "ours[...]" another one.
    """

    inputs: Mapping[str, Any]
    expected: Any
    tolerance: float
    runs: Mapping[str, Callable[[], Run]]


@dataclass(frozen=True)
class Case:
    """One op at one shape. `floor_ms` is the least time possible (see the function)."""

    op: str
    shape: str
    floor_ms: float
    make: Callable[[], Problem]


class WrongResult(Exception):
    """A run whose first call does not give what the case expects."""


def relative_error(got: Any, expected: Any) -> float:
    """The largest ||got - expected|| / ||expected|| among the outputs, in float32 on the device.

    A non-finite or misshapen result, and a nonzero one where zeros are expected, give infinity.

    Raises:
        KeyError: an output that `expected` does not name.
        ValueError: no output at all.
    """
    if isinstance(got, Mapping):
        if not got:
            raise ValueError("the run returns nothing to check")
        return max(relative_error(value, expected[name]) for name, value in got.items())
    x, ref = (as_jax(a).astype(jnp.float32) for a in (got, expected))
    if x.shape != ref.shape or not bool(jnp.all(jnp.isfinite(x))):
        return float("inf")
    distance, size = float(jnp.linalg.norm(x - ref)), float(jnp.linalg.norm(ref))
    if size == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / size


def as_jax(x: Any) -> jax.Array:
    """An array of JAX, numpy or torch as one of JAX; a tensor stays where it is."""
    if hasattr(x, "detach"):
        x = x.detach().contiguous()
        if x.is_cuda:
            importlib.import_module("torch").cuda.synchronize()
        return jnp.from_dlpack(x)
    return jnp.asarray(x)


def checked(run: Run, problem: Problem) -> tuple[float, Run]:
    """The relative error of the first call, and the run to go on with.

    Raises:
        WrongResult: the error is over the tolerance.
    """
    tolerance = problem.tolerance if run.tolerance is None else run.tolerance
    out, run = run.step()
    error = relative_error(run.result(out), problem.expected)
    if not error <= tolerance:
        raise WrongResult(f"relative error {error:.3g} over {tolerance:g}")
    return error, run
