"""Chunks of 64 tokens: the table that cuts a packed batch, and the walk over it that every prefill shares.

The chunk grid is anchored at absolute position 0, not at the start of a segment: a segment that starts at
position 45 fills rows 45..63 of its first chunk. A run resumed at a multiple of 64 therefore does the same
arithmetic, in the same order, as the run that was never cut.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gates import l2norm

CHUNK = 64
"""Tokens of a chunk; the grid of boundary states."""

CONTINUE, ZERO, SLOT, MERGE = 0, 1, 2, 3
"""What a chunk starts from: the chunk before it, zeros, `initial[segment]`, or unit by unit (`keep`)
`initial[segment]` where it is kept and the state of the chunk before it elsewhere."""


class ChunkTable(NamedTuple):
    """The chunks of a packed batch in packed order: int32 data, so that one program serves every batch.

    A chunk of `length` 0 computes nothing. One that belongs to an empty segment still starts and writes its
    state; one that pads the table continues and writes nothing.
    """

    token: np.ndarray | jax.Array  # [NC] first packed token
    row: np.ndarray | jax.Array  # [NC] row of that token, its absolute position modulo 64
    length: np.ndarray | jax.Array  # [NC] tokens
    segment: np.ndarray | jax.Array  # [NC] row of `initial` to start from
    start: np.ndarray | jax.Array  # [NC] CONTINUE, ZERO, SLOT or MERGE
    final: np.ndarray | jax.Array  # [NC] row of `final` to write afterwards, N for none
    boundary: np.ndarray | jax.Array  # [NC] row of `boundary` to write afterwards, NB for none
    cu_seqlens: np.ndarray | jax.Array  # [N + 1] packed start of every segment, then the number of tokens


class DeltaOut(NamedTuple):
    """o `[T, H, V]`, final `[N, H, K, V]`, boundary `[NB, H, K, V]`, all float32."""

    o: jax.Array
    final: jax.Array
    boundary: jax.Array


class Tokens(NamedTuple):
    """What the delta rule reads of some tokens (leading axis): q, k normalised and q scaled, all float32.

    q, k `[., Hk, K]`, v `[., H, V]`, g `[., H, K]` (KDA) or `[., H, 1]` (GDN), beta `[., H]`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def chunk_count(lengths: Sequence[int], starts: Sequence[int]) -> int:
    """Chunks that `chunk_table` needs: those each segment touches, and one for each empty segment."""
    return sum(
        max(1, -(-(start % CHUNK + length) // CHUNK))
        for length, start in zip(lengths, starts, strict=True)
    )


def chunk_table(
    lengths: Sequence[int],
    starts: Sequence[int],
    init_modes: Sequence[int],
    boundaries: Sequence[tuple[int, int]],
    *,
    num_tokens: int,
    num_segments: int,
    num_chunks: int,
    num_boundaries: int,
) -> ChunkTable:
    """Cut packed segments at the multiples of 64 of their absolute positions.

    Segment s holds `lengths[s]` tokens from absolute position `starts[s]` and begins as `init_modes[s]`
    (ZERO, SLOT or MERGE) says. Row i of `boundary` is to hold the state of segment s at position p where
    `boundaries[i] = (s, p)`; p is a multiple of 64 past the segment's start and at most its end.
    Unused rows of all tables, up to the four sizes, are inert; segments not listed keep their initial state.

    Raises:
        ValueError: a table is too small, or a length, start, mode or boundary is impossible.
    """
    _check_segments(lengths, starts, init_modes)
    needed = chunk_count(lengths, starts)
    for name, need, size in (
        ("tokens", sum(lengths), num_tokens),
        ("segments", len(lengths), num_segments),
        ("chunks", needed, num_chunks),
        ("boundaries", len(boundaries), num_boundaries),
    ):
        if need > size:
            raise ValueError(f"the batch has {need} {name}, the table holds {size}")
    rows = _boundary_rows(lengths, starts, boundaries)
    chunks = []
    token = 0
    for segment, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        position, end, mode = start, start + length, int(init_modes[segment])
        while True:
            stop = min(end, position // CHUNK * CHUNK + CHUNK)
            final = segment if stop == end else num_segments
            boundary = rows.pop((segment, stop), num_boundaries) if stop > position else num_boundaries
            chunks.append((token, position % CHUNK, stop - position, segment, mode, final, boundary))
            token, position, mode = token + stop - position, stop, CONTINUE
            if stop == end:
                break
    padding = (0, 0, 0, 0, CONTINUE, num_segments, num_boundaries)
    columns = np.array(chunks + [padding] * (num_chunks - needed), np.int32).reshape(-1, 7).T
    cu = np.full(num_segments + 1, sum(lengths), np.int32)
    cu[: len(lengths) + 1] = np.cumsum([0, *lengths])
    return ChunkTable(*np.ascontiguousarray(columns), cu)


def _check_segments(lengths: Sequence[int], starts: Sequence[int], modes: Sequence[int]) -> None:
    if not len(lengths) == len(starts) == len(modes):
        raise ValueError(f"{len(lengths)} lengths, {len(starts)} starts and {len(modes)} init modes")
    for segment, (length, start, mode) in enumerate(zip(lengths, starts, modes, strict=True)):
        if length < 0 or start < 0:
            raise ValueError(f"segment {segment} has length {length} and start {start}")
        if mode not in (ZERO, SLOT, MERGE):
            raise ValueError(f"segment {segment} has init mode {mode}, not one of {ZERO, SLOT, MERGE}")
    if modes and modes[0] == MERGE:
        raise ValueError("segment 0 merges with the segment before it, and there is none")


def _boundary_rows(
    lengths: Sequence[int], starts: Sequence[int], boundaries: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    rows: dict[tuple[int, int], int] = {}
    for row, (segment, position) in enumerate(boundaries):
        if not 0 <= segment < len(lengths):
            raise ValueError(f"boundary {row} names segment {segment} of {len(lengths)}")
        first, last = starts[segment], starts[segment] + lengths[segment]
        if position % CHUNK or not first < position <= last:
            raise ValueError(
                f"boundary {row} at position {position} of segment {segment} is not a multiple of {CHUNK} "
                f"in ({first}, {last}]"
            )
        if (segment, position) in rows:
            raise ValueError(f"boundary {row} repeats position {position} of segment {segment}")
        rows[segment, position] = row
    return rows


def prepare(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> Tokens:
    """Normalise and scale raw inputs; `g [., H]` gets a key axis of 1. See `Tokens`."""
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
    return Tokens(l2norm(q) * q.shape[-1] ** -0.5, l2norm(k), v, g if g.ndim == 3 else g[..., None], beta)


def walk(
    step: Callable[[jax.Array, Tokens], tuple[jax.Array, jax.Array]],
    inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array],
    initial: jax.Array,
    table: ChunkTable,
    keep: jax.Array | None,
    num_boundaries: int,
) -> DeltaOut:
    """Carry the state through the chunks; `step(state [H, K, V], Tokens of 64) -> (state, o [64, H, V])`.

    Rows of a chunk that hold no token are zeros, for which the delta rule changes nothing: selected, so that
    garbage in padding tokens reaches no real row.
    """
    table = ChunkTable(*(jnp.asarray(column) for column in table))
    rows = jnp.arange(CHUNK, dtype=jnp.int32)
    # A select of `initial`, not a constant, so that under shard_map the carry varies as its updates do.
    nothing = jnp.where(False, initial[:1], 0.0)
    kept = jnp.ones(initial.shape[1:3], bool) if keep is None else keep

    def visit(carry, chunk):
        state, final, boundary = carry
        loaded = initial[chunk.segment]
        merged = jnp.where(kept[..., None], loaded, state)
        state = jax.lax.select_n(chunk.start, state, nothing[0], loaded, merged)
        index = chunk.token - chunk.row + rows
        real = (rows >= chunk.row) & (rows < chunk.row + chunk.length)

        def some(state):
            return step(state, prepare(*(_select(real, index, x) for x in inputs)))

        def none(state):
            return state, jnp.broadcast_to(nothing[0, None, :, 0], (CHUNK, *inputs[2].shape[1:]))

        state, o = jax.lax.cond(chunk.length > 0, some, none, state)
        final = jax.lax.dynamic_update_index_in_dim(final, state, chunk.final, 0)
        boundary = jax.lax.dynamic_update_index_in_dim(boundary, state, chunk.boundary, 0)
        return (state, final, boundary), (o, jnp.where(real, index, inputs[0].shape[0]))

    start = (
        nothing[0],
        jnp.concatenate([initial, nothing]),
        jnp.repeat(nothing, num_boundaries + 1, axis=0),
    )
    columns = table._replace(cu_seqlens=jnp.zeros_like(table.token))
    (_, final, boundary), (o, place) = jax.lax.scan(visit, start, columns)
    return DeltaOut(_packed(o, place, inputs[0].shape[0]), final[:-1], boundary[:-1])


def _select(real: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    """Rows `index` of x where `real`, zeros elsewhere."""
    mask = real.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(mask, jnp.take(x, index, axis=0, mode="clip"), 0)


def _packed(o: jax.Array, place: jax.Array, tokens: int) -> jax.Array:
    """Chunk rows `o [NC, 64, H, V]` put at packed tokens `place [NC, 64]`; zeros where no row goes."""
    flat = o.reshape(-1, *o.shape[2:])
    source = jnp.full(tokens, -1, jnp.int32)
    source = source.at[place.reshape(-1)].set(jnp.arange(flat.shape[0], dtype=jnp.int32), mode="drop")
    return _select(source >= 0, source, flat)
