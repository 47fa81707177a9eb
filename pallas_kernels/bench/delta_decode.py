"""Recurrent decode at the shapes of both released models: one token a request, states in place.

32 value heads of 128 x 128 in float32 (16 key heads for GDN), random slots of a pool of two layers.
`delta_decode` is what peers compute; `delta_step` has the gates and the output norm in it.
`scale_states` is what XLA reaches when it only reads and writes as many states, in place or not.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import chunked, composed
from pallas_kernels.bench.timing import Case, Problem, Run, floor_ms
from pallas_kernels.mgpu import delta_decode as kernel
from pallas_kernels.mgpu.delta_tile import Tiling

HEADS, KEY_HEADS, DIM = 32, {"kda": 32, "gdn": 16}, 128
LAYER, EPS = 1, 1e-6
STATE_BYTES = 2 * HEADS * DIM * DIM * 4
"""Of a request, in and out."""
BATCHES = (1, 8, 32, 64, 128, 256)
SMALL = (Tiling(32, 0, "registers"), Tiling(64, 0))
LARGE = (Tiling(64, 0), Tiling(64, 1), Tiling(128, 1))
TILINGS = {1: SMALL, 8: SMALL, 32: LARGE, 64: LARGE, 128: LARGE, 256: LARGE}
STEP = (Tiling(128, 0), Tiling(128, 1))
SCALED = (64, 256)
"""Batches whose states are scaled."""


def cases() -> Iterator[Case]:
    """All batches of both kinds, without the gates and the norm, then with them; bare states."""
    for kind in ("kda", "gdn"):
        for batch in BATCHES:
            shape, floor = f"{kind} B={batch}", floor_ms(moved_bytes(kind, batch))
            make = partial(_decode, kind, batch, TILINGS[batch])
            yield Case("delta_decode", shape, floor, make)
    for kind in ("kda", "gdn"):
        for batch in BATCHES:
            shape, floor = f"{kind} B={batch}", floor_ms(moved_bytes(kind, batch))
            yield Case("delta_step", shape, floor, partial(_step, kind, batch, STEP))
    for batch in SCALED:
        floor = floor_ms(batch * STATE_BYTES)
        yield Case("scale_states", f"B={batch}", floor, partial(_scale, batch))


def moved_bytes(kind: str, batch: int) -> int:
    """States in and out; q, k, v and o, 16 bits an element, and KDA's decay, 32, beside them."""
    vectors = (2 * KEY_HEADS[kind] + 2 * HEADS) * DIM * 2 + HEADS * DIM * 4 * (kind == "kda")
    return batch * (STATE_BYTES + vectors)


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def _states(batch: int) -> tuple[jax.Array, jax.Array]:
    """A pool with one slot to spare beside the padding slot, and the slots of the requests."""
    (pool,) = _normal(1, (2, batch + 2, HEADS, DIM, DIM))
    slots = 1 + jax.random.permutation(jax.random.key(2), batch + 1)[:batch]
    return 0.1 * pool, slots.astype(jnp.int32)


def _decode(kind: str, batch: int, tilings: tuple[Tiling, ...]) -> Problem:
    keys, values = (batch, KEY_HEADS[kind], DIM), (batch, HEADS, DIM)
    units = values if kind == "kda" else values[:2]
    q, k, v, g, beta = _normal(0, keys, keys, values, units, values[:2])
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    pool, slots = _states(batch)
    inputs = {"q": q, "k": k, "v": v, "g": -jnp.exp(1.4 * g - 0.3), "beta": jax.nn.sigmoid(beta)}
    arrays = tuple(inputs.values())

    runs = _Runs(kernel.decode, chunked.decode, (LAYER,), pool, slots, arrays)
    return Problem(
        inputs=inputs | {"pool": pool, "slots": slots, "layer": LAYER},
        expected=runs.expected(),
        tolerance=1e-5,
        runs=runs.all(tilings) | {"ours[slots in order]": runs.in_order},
    )


def _step(kind: str, batch: int, tilings: tuple[Tiling, ...]) -> Problem:
    keys, values = KEY_HEADS[kind] * DIM, (batch, HEADS, DIM)
    units = values if kind == "kda" else values[:2]
    channels = (batch, 2 * keys + HEADS * DIM)
    qkv, raw, beta, gate = _normal(0, channels, units, values[:2], values)
    A_log, dt_bias, weight = _normal(3, (HEADS,), units[1:], (DIM,))
    qkv, raw, beta, gate, weight = (
        x.astype(jnp.bfloat16) for x in (qkv, raw, beta, gate, 1.0 + 0.1 * weight)
    )
    pool, slots = _states(batch)
    arrays = (qkv, raw, beta, A_log, dt_bias, gate, weight)

    runs = _Runs(kernel.step, composed.xla, (LAYER, EPS), pool, slots, arrays)
    return Problem({}, runs.expected(), 4e-3, runs.all(tilings))


def _scale(batch: int) -> Problem:
    def scale(states: jax.Array) -> tuple[jax.Array]:
        return (1.0001 * states,)

    def run(in_place: bool) -> Run:
        step = jax.jit(scale, donate_argnums=(0,) if in_place else ())
        return Run(step, (jnp.copy(states),), int(in_place), lambda out: out[0])

    (states,) = _normal(4, (batch, HEADS, DIM, DIM))
    runs = {"xla": partial(run, True), "xla[out of place]": partial(run, False)}
    return Problem({}, scale(states)[0], 1e-6, runs)


class _Runs(NamedTuple):
    """The kernel and its XLA form on the same arrays: tokens, then the pool, slots and statics."""

    mosaic: Callable[..., Any]
    xla: Callable[..., Any]
    statics: tuple[Any, ...]
    pool: jax.Array
    slots: jax.Array
    tokens: tuple[jax.Array, ...]

    def all(self, tilings: tuple[Tiling, ...]) -> dict[str, Callable[[], Run]]:
        runs = {"ours": partial(self.run, self.mosaic), "xla": partial(self.run, self.xla)}
        for t in tilings:
            name = f"ours[V={t.block_v},stages={t.stages},{t.vectors}]"
            runs[name] = partial(self.run, partial(self.mosaic, tiling=t))
        return runs

    def in_order(self) -> Run:
        """States that follow each other in the pool as their requests do."""
        slots = 1 + jnp.arange(self.slots.shape[0], dtype=jnp.int32)
        pool = self.pool.at[LAYER, slots].set(self.pool[LAYER, self.slots])
        return self._replace(pool=pool, slots=slots).run(self.mosaic)

    def run(self, op: Callable[..., Any]) -> Run:
        step = jax.jit(partial(self.call, op), donate_argnums=0)
        return Run(step, (jnp.copy(self.pool), self.slots, *self.tokens), 1, self.result)

    def expected(self) -> dict[str, jax.Array]:
        return self.result(
            jax.jit(partial(self.call, self.xla))(self.pool, self.slots, *self.tokens)
        )

    def call(self, op: Callable[..., Any], pool: jax.Array, slots: jax.Array, *tokens: jax.Array):
        return op(*tokens, pool, slots, *self.statics)

    def result(self, out: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        pool, o = out
        return {"o": o, "state": pool[LAYER, self.slots]}
