"""The ops that have several implementations: for each, one typed signature and one list of them."""

import jax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import chunked, conv, parallel, reference
from pallas_kernels import grouped_matmul as grouped
from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.dispatch import Implementation, Op, anything
from pallas_kernels.walk import DeltaOut

_DELTA_PREFILL = Op(
    "delta_prefill",
    (
        Implementation("xla", anything, chunked.prefill),
        Implementation("reference", anything, reference.prefill),
    ),
)
_DELTA_DECODE = Op(
    "delta_decode",
    (
        Implementation("xla", anything, chunked.decode),
        Implementation("reference", anything, reference.decode),
    ),
)
_SHORT_CONV = Op(
    "short_conv",
    (
        Implementation("xla", anything, conv.short_conv),
        Implementation("reference", anything, reference.short_conv),
    ),
)
_GROUPED_MATMUL = Op(
    "grouped_matmul",
    (
        Implementation("xla", anything, grouped.grouped_matmul),
        Implementation("reference", anything, reference.grouped_matmul),
    ),
)


def delta_prefill(
    q: Float[Array, "T Hk K"],
    k: Float[Array, "T Hk K"],
    v: Float[Array, "T H V"],
    g: Float[Array, "T H K"] | Float[Array, "T H"],
    beta: Float[Array, "T H"],
    initial: Float32[Array, "N H K V"],
    table: ChunkTable,
    *,
    keep: Bool[Array, "H K"] | None = None,
    num_boundaries: int,
    impl: str = "auto",
) -> DeltaOut:
    """The delta rule over packed segments: KDA (a log decay a key channel) or GDN (one a head).

        S' = diag(exp g) S;   u = beta (v - S'^T k);   S = S' + k u^T;   o = S^T q

    q and k are raw: they are l2-normalised inside and q is scaled by K**-0.5. Value head j uses key
    head `j // (H // Hk)`. g <= 0 is the natural log decay, -inf included. Any float dtype; computed
    in float32. `keep` marks the units that segments of mode MERGE take from `initial`; without it
    they take all of them.

    Returns o `[T, H, V]` (zeros in padding tokens), final `[N, H, K, V]` and boundary
    `[num_boundaries, H, K, V]`, all float32. The final state of an empty segment is what it started
    from, bit for bit; rows of `boundary` that the table does not ask for are zeros.

    Raises:
        ValueError: unknown `impl`, heads that do not divide, or g of neither shape.
        RuntimeError, NotImplementedError: `impl` cannot run here (see `dispatch`).
    """
    _check_heads(q, v, g)
    return _DELTA_PREFILL(impl, q, k, v, g, beta, initial, table, keep, num_boundaries)


def delta_train(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"] | Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
) -> Float32[Array, "B T H V"]:
    """The delta rule over whole sequences from a zero state, for training: o of `delta_prefill`.

    Differentiable, and parallel over batch, heads and chunks except for one short step a chunk. T
    is a multiple of 64: pad on the right, which no earlier output sees. A log decay below -5 a step
    counts as -5.

    Raises:
        ValueError: T off the grid, heads that do not divide, or g of neither shape.
    """
    if q.shape[1] % CHUNK:
        raise ValueError(f"{q.shape[1]} tokens are no multiple of {CHUNK}")
    _check_heads(q[0], v[0], g[0])
    return jax.vmap(parallel.sequence)(q, k, v, g, beta)


def delta_decode(
    q: Float[Array, "B Hk K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H K"] | Float[Array, "B H"],
    beta: Float[Array, "B H"],
    pool: Float32[Array, "L S H K V"],
    slots: Int32[Array, "B"],
    *,
    layer: int,
    impl: str = "auto",
) -> tuple[Float32[Array, "L S H K V"], Float32[Array, "B H V"]]:
    """One token of each request, its state in `pool[layer, slots]`: (pool, o). See `delta_prefill`.

    Slots other than 0 are distinct. Rows of slot 0 are padding: o is zero there and the slot stays
    as it was. Donate the pool, and it is updated in place.
    """
    _check_heads(q, v, g)
    return _DELTA_DECODE(impl, q, k, v, g, beta, pool, slots, layer)


def short_conv(
    u: Float[Array, "T C"],
    weight: Float[Array, "C 4"],
    window: Float[Array, "N C 3"],
    cu_seqlens: Int32[Array, "N+1"],
    *,
    impl: str = "auto",
) -> Float[Array, "T C"]:
    """silu(sum_j weight[:, j] u[t - 3 + j]), each segment on its own and preceded by its `window`.

    Computed in float32, returned in u's dtype; zeros in padding tokens.
    """
    return _SHORT_CONV(impl, u, weight, window, cu_seqlens)


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "G K N"],
    group_sizes: Int32[Array, "G"],
    *,
    impl: str = "auto",
) -> Float[Array, "M N"]:
    """x @ w[group of the row], rows grouped consecutively; rows past the last group give zeros.

    Accumulated in float32, returned in x's dtype.
    """
    return _GROUPED_MATMUL(impl, x, w, group_sizes)


def _check_heads(q: jax.Array, v: jax.Array, g: jax.Array) -> None:
    (_, key_heads, key_dim), heads = q.shape, v.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} value heads do not divide among {key_heads} key heads")
    if g.shape[1:] not in ((heads,), (heads, key_dim)):
        raise ValueError(f"log decay {g.shape} is neither [., {heads}] nor [., {heads}, {key_dim}]")
