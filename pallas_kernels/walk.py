"""The walk over the chunks of a packed batch, which every prefill of the delta rule shares.

It gathers the tokens of every chunk, starts the state where the table says so, and writes final and
boundary states into buffers whose last row takes what nobody asked for.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.gates import l2norm


class DeltaOut(NamedTuple):
    """o `[T, H, V]`, final `[N, H, K, V]`, boundary `[NB, H, K, V]`, all float32."""

    o: jax.Array
    final: jax.Array
    boundary: jax.Array


class Tokens(NamedTuple):
    """What the delta rule reads of some tokens (leading axis), all float32.

    q, k `[., Hk, K]` normalised and q scaled, v `[., H, V]`, g `[., H, K]` (KDA) or `[., H, 1]`
    (GDN), beta `[., H]`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def prepare(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> Tokens:
    """Normalise and scale raw inputs; `g [., H]` gets a key axis of 1. See `Tokens`."""
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    return Tokens(
        l2norm(q) * q.shape[-1] ** -0.5, l2norm(k), v, g if g.ndim == 3 else g[..., None], beta
    )


def walk[Local](
    local: Callable[[Tokens], Local],
    step: Callable[[jax.Array, Local], tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array],
    initial: jax.Array,
    table: ChunkTable,
    keep: jax.Array | None,
    num_boundaries: int,
) -> DeltaOut:
    """Carry the state through the chunks with `step(state, local(64 Tokens)) -> (state, o [64, H,
    V])`. What `local` makes depends on no state, so it is made for all chunks side by side.

    Rows of a chunk that hold no token are zeros, for which the delta rule changes nothing. They are
    selected, never multiplied away, so that garbage in padding tokens reaches no real row.
    """
    chunks = ChunkTable(*(jnp.asarray(column) for column in table))
    rows = jnp.arange(CHUNK, dtype=jnp.int32)
    # A select of `initial`, no constant: under shard_map the carry must vary as its updates do.
    zero = jnp.where(False, initial[0], 0.0)
    o_zero = jnp.broadcast_to(zero[None, :, 0], (CHUNK, *inputs[2].shape[1:]))
    tokens = inputs[0].shape[0]
    row, length = chunks.row[:, None], chunks.length[:, None]
    index = jnp.asarray(chunks.token[:, None] - row + rows)
    real = (rows >= row) & (rows < row + length)

    def gathered(real: jax.Array, index: jax.Array) -> Local:
        return local(prepare(*(_select(real, index, x) for x in inputs)))

    def visit(carry, scanned):
        state, final, boundary = carry
        chunk, made = scanned
        loaded = initial[chunk.segment]
        merged = loaded if keep is None else jnp.where(keep[..., None], loaded, state)
        state = jax.lax.select_n(chunk.start, state, zero, loaded, merged)
        state, o = _unless_empty(chunk.length, step, state, made, o_zero)
        final = jax.lax.dynamic_update_index_in_dim(final, state, chunk.final, 0)
        boundary = jax.lax.dynamic_update_index_in_dim(boundary, state, chunk.boundary, 0)
        return (state, final, boundary), o

    final = jnp.concatenate([initial, zero[None]])
    boundary = jnp.broadcast_to(zero, (num_boundaries + 1, *zero.shape))
    per_chunk = chunks._replace(cu_seqlens=jnp.zeros_like(chunks.token))
    made = jax.vmap(gathered)(real, index)
    (_, final, boundary), o = jax.lax.scan(visit, (zero, final, boundary), (per_chunk, made))
    place = jnp.where(real, index, tokens)
    return DeltaOut(_packed(o, place, tokens), final[:-1], boundary[:-1])


def _unless_empty[Local](
    length: jax.Array,
    step: Callable[[jax.Array, Local], tuple[jax.Array, jax.Array]],
    state: jax.Array,
    made: Local,
    o_zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`step(state, made)`, but a chunk of length 0 leaves the state as it is."""

    def skipped(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(length > 0, lambda s: step(s, made), lambda s: (s, o_zero), state)

    def selected(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A GPU waits for its host at every cond, which costs more than an empty chunk does.
        new, o = step(state, made)
        return jnp.where(length > 0, new, state), o

    return jax.lax.platform_dependent(state, cpu=skipped, default=selected)


def _select(real: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    """Rows `index` of x where `real`, zeros elsewhere."""
    mask = real.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(mask, jnp.take(x, index, axis=0, mode="clip"), 0)


def _packed(o: jax.Array, place: jax.Array, tokens: int) -> jax.Array:
    """Chunk rows `o [NC, 64, H, V]` put at packed tokens `place [NC, 64]`; zeros elsewhere."""
    flat = o.reshape(-1, *o.shape[2:])
    source = jnp.full(tokens, -1, jnp.int32)
    source = source.at[place.reshape(-1)].set(
        jnp.arange(flat.shape[0], dtype=jnp.int32), mode="drop"
    )
    return _select(source >= 0, source, flat)
