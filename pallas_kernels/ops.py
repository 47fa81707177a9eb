"""The ops that have several implementations: a typed signature for each; see `implementations`."""

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from pallas_kernels import parallel
from pallas_kernels.chunks import CHUNK, ChunkTable
from pallas_kernels.implementations import (
    DELTA_DECODE,
    DELTA_PREFILL,
    DELTA_STEP,
    EXPERT_MLP,
    GROUPED_MATMUL,
    GROUPED_SWIGLU,
    PAGED_ATTENTION_DECODE,
    PAGED_ATTENTION_PREFILL,
    RAGGED_PACK,
    RAGGED_UNPACK,
    SHORT_CONV,
)
from pallas_kernels.paged_attention import PagedRows
from pallas_kernels.walk import DeltaOut


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
    return DELTA_PREFILL(impl, q, k, v, g, beta, initial, table, keep, num_boundaries)


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
    return DELTA_DECODE(impl, q, k, v, g, beta, pool, slots, layer)


def delta_step(
    qkv: Float[Array, "B C"],
    raw: Float[Array, "B H K"] | Float[Array, "B H"],
    beta: Float[Array, "B H"],
    A_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"] | Float[Array, "H"],
    gate: Float[Array, "B H V"],
    weight: Float[Array, "V"],
    pool: Float32[Array, "L S H K V"],
    slots: Int32[Array, "B"],
    *,
    layer: int,
    eps: float,
    impl: str = "auto",
) -> tuple[Float32[Array, "L S H K V"], Float[Array, "B H V"]]:
    """All of a recurrent layer between its projections and short convolution: (pool, y).

    `delta_decode` of q | k | v `[B, 2 Hk K + H V]` with g = kda_gate(raw, A_log, dt_bias), or
    gdn_gate where raw is one a head, and beta = sigmoid(beta); its o, rounded to qkv's dtype,
    through kda_output or gdn_output with `gate`, `weight` and `eps`. y has qkv's dtype and is zero
    for padding.

    Raises:
        ValueError: unknown `impl`, or channels that are no q | k | v.
        RuntimeError, NotImplementedError: `impl` cannot run here (see `dispatch`).
    """
    heads, key_dim, value_dim = pool.shape[2:]
    keys, rest = divmod(qkv.shape[1] - heads * value_dim, 2 * key_dim)
    if rest or keys < 1 or heads % keys:
        raise ValueError(
            f"{qkv.shape[1]} channels are no q | k | v of {heads} value heads of {value_dim} and "
            f"key heads of {key_dim} among which they divide"
        )
    return DELTA_STEP(impl, qkv, raw, beta, A_log, dt_bias, gate, weight, pool, slots, layer, eps)


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
    return SHORT_CONV(impl, u, weight, window, cu_seqlens)


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
    return GROUPED_MATMUL(impl, x, w, group_sizes)


def grouped_swiglu(
    x: Float[Array, "M K"],
    w: Float[Array, "G K N"],
    group_sizes: Int32[Array, "G"],
    *,
    impl: str = "auto",
) -> Float[Array, "M N//2"]:
    """silu(x @ gate) * (x @ up) with gate | up = w[group of the row]; rows as in `grouped_matmul`.

    The kernel rounds once, at the end; the other forms also round both products to x's dtype.

    Raises:
        ValueError: unknown `impl`, or an odd number of columns.
    """
    if w.shape[2] % 2:
        raise ValueError(f"{w.shape[2]} columns are no two halves")
    return GROUPED_SWIGLU(impl, x, w, group_sizes)


def expert_mlp(
    h: Float[Array, "T D"],
    gate_up: Float[Array, "E D N"],
    down: Float[Array, "E I D"],
    chosen: Int32[Array, "T top"],
    *,
    impl: str = "auto",
) -> Float[Array, "T top D"]:
    """What each token's chosen experts make of it: down(silu(h @ gate) * (h @ up)), in h's dtype.

    A choice of E or more is no expert: zeros. See `grouped_swiglu` and `grouped_matmul`.

    Raises:
        ValueError: unknown `impl`, or matrices that do not belong together.
    """
    if gate_up.shape[2] != 2 * down.shape[1]:
        raise ValueError(f"{gate_up.shape[2]} columns are no two halves of {down.shape[1]}")
    return EXPERT_MLP(impl, h, gate_up, down, chosen)


def ragged_pack(
    rows: Shaped[Array, "S R *K V"],
    scales: Float32[Array, "S R *K"] | None,
    temporal: Float32[Array, "L N H K V"],
    index: Int32[Array, "R"],
    slots: Int32[Array, "M"],
    sources: Int32[Array, "M"],
    *,
    impl: str = "auto",
) -> tuple[Shaped[Array, "S R *K V"], Float32[Array, "S R *K"] | None]:
    """Store units `index` of state `temporal[:, sources[m]]` as checkpoint `slots[m]` of a pool.

    A unit is a row of V (`rows` [S, R, V], KDA) or a block [K, V] (`rows` [S, R, K, V], GDN);
    `index` numbers those of all layers, layer-major. `rows` is float32, or int8 with one float32 of
    `scales` a row of V (Eq. 10 of the DASC paper; `packing.quantize`). Slot 0 is the sink: what
    goes there, or to a slot outside the pool, is dropped. The others are distinct. Donate the pool
    (`rows` and `scales`), and it is updated in place.

    Raises:
        ValueError: unknown `impl`, or arrays that do not belong together.
        RuntimeError, NotImplementedError: `impl` cannot run here (see `dispatch`).
    """
    _check_packing(rows, scales, temporal)
    if index.shape[0] != rows.shape[1]:
        raise ValueError(f"{index.shape[0]} units for checkpoints of {rows.shape[1]}")
    return RAGGED_PACK(impl, rows, scales, temporal, index, slots, sources)


def ragged_unpack(
    temporal: Float32[Array, "L N H K V"],
    rows: Shaped[Array, "S R *K V"],
    scales: Float32[Array, "S R *K"] | None,
    inverse: Int32[Array, "U"],
    slots: Int32[Array, "M"],
    targets: Int32[Array, "M"],
    *,
    impl: str = "auto",
) -> Float32[Array, "L N H K V"]:
    """Load checkpoint `slots[m]` of a pool (see `ragged_pack`) into `temporal[:, targets[m]]`.

    Unit u of a state, of those of all layers, becomes row `inverse[u]` of the checkpoint, exact
    zeros where that is -1; zeros everywhere if the slot is 0 or outside the pool. A pair of slot 0
    and target 0 is padding and changes nothing, nor does a target outside `temporal`. The other
    targets are distinct. Donate `temporal`, and it is updated in place.

    Raises:
        ValueError: unknown `impl`, or arrays that do not belong together.
        RuntimeError, NotImplementedError: `impl` cannot run here (see `dispatch`).
    """
    _check_packing(rows, scales, temporal)
    layers, _, heads, key, _ = temporal.shape
    units = layers * heads * (key if rows.ndim == 3 else 1)
    if inverse.shape[0] != units:
        raise ValueError(f"a table of {inverse.shape[0]} units for states of {units}")
    return RAGGED_UNPACK(impl, temporal, rows, scales, inverse, slots, targets)


def paged_attention_prefill(
    q: Float[Array, "T Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "N M"],
    positions: Int32[Array | np.ndarray, "T"],
    table: ChunkTable,
    *,
    scale: float,
    impl: str = "auto",
) -> Float32[Array, "T Hq Dv"]:
    """Causal attention of packed tokens over the pages of their own segments.

    Token t, at `positions[t]` of its segment, sees the keys up to its own, which must already lie
    in the pages of row `segment` of the page table; see `paged_attention_decode`. Rows of padding
    tokens are zeros.

    Raises:
        ValueError: unknown `impl`.
        RuntimeError, NotImplementedError: `impl` cannot run here (see `dispatch`).
    """
    return PAGED_ATTENTION_PREFILL(impl, q, cache, page_table, positions, table, scale)


def paged_attention_decode(
    q: Float[Array, "B Hq Dk"],
    cache: PagedRows,
    page_table: Int32[Array | np.ndarray, "B M"],
    lengths: Int32[Array | np.ndarray, "B"],
    *,
    scale: float,
    impl: str = "auto",
) -> Float32[Array, "B Hq Dv"]:
    """Attention of one query of each request over its first `lengths` keys, its own included.

        o = softmax(scale q k^T) v

    Key j of request b is row `j % 64` of page `page_table[b, j // 64]` of the layer. Query head i
    uses key head `i // (Hq // Hkv)`. What lies past a request's length, NaN included, reaches no
    result; a length of 0 gives zeros. A request's bits depend on nothing else in the batch.

    Raises:
        ValueError: unknown `impl`.
        RuntimeError, NotImplementedError: `impl` cannot run here (see `dispatch`).
    """
    return PAGED_ATTENTION_DECODE(impl, q, cache, page_table, lengths, scale)


def _check_packing(rows: jax.Array, scales: jax.Array | None, temporal: jax.Array) -> None:
    if rows.shape[2:] not in (temporal.shape[4:], temporal.shape[3:]):
        raise ValueError(f"units {rows.shape[2:]} are neither rows nor blocks of {temporal.shape}")
    if str(rows.dtype) != ("float32" if scales is None else "int8"):
        raise ValueError(f"{rows.dtype} rows with{'out' if scales is None else ''} scales")


def _check_heads(q: jax.Array, v: jax.Array, g: jax.Array) -> None:
    (_, key_heads, key_dim), heads = q.shape, v.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} value heads do not divide among {key_heads} key heads")
    if g.shape[1:] not in ((heads,), (heads, key_dim)):
        raise ValueError(f"log decay {g.shape} is neither [., {heads}] nor [., {heads}, {key_dim}]")
