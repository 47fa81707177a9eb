"""What the 64 tokens of a chunk are to each other under KDA, on Hopper, for every (chunk, head).

With G the cumulative log decay of the chunk and everything below a function of no state:

    q_start = q e^G, k_start = k e^G, k_end = k e^(G_last - G), all bfloat16 [64, 128];
    attend^T, solve^T bfloat16 [64, 64]: P_ij = q_i k_j e^(G_i - G_j) for j <= i, and
    (I + diag(beta) tril(A, -1))^-1 diag(beta) with A_ij = k_i k_j e^(G_i - G_j);
    decay e^G_last, float32 [128].

e^(-G) alone overflows, so a pair (i, j) with i in block b of 16 tokens goes through the anchor
R_b = G[first token of b] - 75: e^(G_i - R_b) and e^(R_b - G_j) lie in [e^-75, e^75] because a log
decay counts as -10 at least, and e^-10 of a state is below what bfloat16 operands resolve. An
anchor knows no later token, so appending tokens changes no earlier bit.

Products are computed transposed, [j, i]: rows of one operand are all keys, decayed to the anchor.
The blocks on the diagonal are inverted by substitution in float32; with D their inverse and N = D
times the rest, which is nilpotent, the whole is (I - N)(I + N^2) D.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, Column
from pallas_kernels.mgpu.common import LANE

BLOCK, BLOCKS, DIM, HALF = 16, 4, 128, 64
LEAST_DECAY = -10.0
LOG2E = math.log2(math.e)
SHIFT = 75.0 * LOG2E
PARAMS = LANE.replace(
    approx_math=True,
    # Threads read what others wrote only past a commit or a barrier that the kernel names.
    unsafe_no_auto_barriers=True,
)
SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
Q_START, K_START, K_END = range(3)
SOLVE, ATTEND = range(2)
_PADDED = DIM + 4  # float32 a row of G, so that 8 rows of it lie in different banks
_WGMMA = plgpu.Layout.WGMMA
_CHANNEL = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)
# A warp a block, a lane a column: twice, for a warp has 32 lanes.
_BY_BLOCK = plgpu.Layout.TILED(
    plgpu.Tiling(((BLOCKS, BLOCK), (1,))),
    warp_dims=(-3,),
    lane_dims=(plgpu.Replicated(2), -2),
    vector_dim=-1,
)


class Prepared(NamedTuple):
    """wide `[NC, H, 3, 64, 128]` and square `[NC, H, 2, 64, 64]` bfloat16, indexed by the names
    above; decay `[NC, H, 128]` float32. What belongs to a chunk of length 0 is arbitrary."""

    wide: jax.Array
    square: jax.Array
    decay: jax.Array


def prepare(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    token: Column,
    length: Column,
    interpret: Any = None,
) -> Prepared:
    """q, k `[T, H, 128]` bfloat16, raw; g `[T, H, 128]` float32; beta `[NC, H, 64]` float32, zero
    past a chunk's length; token, length `[NC]`. A chunk's tokens are its first rows."""
    heads, chunks = q.shape[1], token.shape[0]

    def kda_prep(q, k, g, beta, token, length, wide, square, decay, **scratch):
        item = lax.axis_index("item")
        chunk, head = lax.div(item, heads), lax.rem(item, heads)

        @pl.when(length[chunk] > 0)
        def _():
            source = (q, k, g, beta.at[chunk, head])
            target = Prepared(*(x.at[chunk, head] for x in (wide, square, decay)))
            _chunk(source, head, token[chunk], length[chunk], target, scratch, bool(interpret))

    matrix = plgpu.SMEM((CHUNK, DIM), jnp.bfloat16, transforms=SWIZZLED)
    square = plgpu.SMEM((CHUNK, CHUNK), jnp.bfloat16, transforms=SWIZZLED)
    small = plgpu.SMEM((CHUNK, BLOCK), jnp.float32)
    return Prepared(
        *plgpu.kernel(
            kda_prep,
            out_type=(
                jax.ShapeDtypeStruct((chunks, heads, 3, CHUNK, DIM), jnp.bfloat16),
                jax.ShapeDtypeStruct((chunks, heads, 2, CHUNK, CHUNK), jnp.bfloat16),
                jax.ShapeDtypeStruct((chunks, heads, DIM), jnp.float32),
            ),
            scratch_types={
                "raw": plgpu.SMEM((CHUNK, DIM), jnp.bfloat16),
                "gates": plgpu.SMEM((CHUNK, _PADDED), jnp.float32),
                "q_rows": matrix,
                "k_rows": matrix,
                "left": square,
                "right": square,
                "erase": small,
                "inverse": small,
                "arrived": plgpu.Barrier(),
            },
            grid=(chunks * heads,),
            grid_names=("item",),
            compiler_params=PARAMS,
            interpret=interpret,
            kernel_name="kda_prep",
        )(q, k, g, beta, token, length)
    )


def _chunk(source, head, token, length, target, scratch, interpreted) -> None:
    q, k, g, beta = source
    rows = pl.ds(token, CHUNK)
    raw, arrived = scratch["raw"], scratch["arrived"]
    plgpu.copy_gmem_to_smem(q.at[rows, head], raw, arrived)
    last = _cumulate(g, head, token, length, scratch["gates"])
    target.decay[...] = jnp.exp2(last)
    plgpu.commit_smem()
    plgpu.barrier_wait(arrived)
    queries = _masked(raw, length)
    plgpu.commit_smem()
    plgpu.copy_gmem_to_smem(k.at[rows, head], raw, arrived)
    plgpu.barrier_wait(arrived)
    keys = _masked(raw, length)
    scale = _inverse_norm(keys)
    strength = _load(beta, _WGMMA.reduce(1))
    _decayed(scratch, queries, keys, scale, strength, target.wide)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    erase, near, attend = _pairs(scratch, keys, scale)
    scratch["left"][...] = attend
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch["left"], target.square.at[ATTEND])
    solve = _inverted(scratch, erase, near, interpreted) * _along_rows(strength)
    scratch["right"][...] = solve.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch["right"], target.square.at[SOLVE])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _decayed(scratch, queries, keys, scale, strength, wide) -> None:
    """Rows of q and of beta k, decayed from their anchors, and the three matrices of the walk."""
    q_scale = _inverse_norm(queries) * DIM**-0.5
    for half in range(2):
        gates = _gates(scratch["gates"], half)
        last = _spread(_load(scratch["gates"].at[CHUNK - 1, _half(half)], _WGMMA.reduce(0)), 1)
        q = queries[half].astype(jnp.float32) * _along_rows(q_scale)
        k = keys[half].astype(jnp.float32) * _along_rows(scale)
        growth = jnp.exp2(gates - _own_anchor(scratch["gates"], half))
        scratch["q_rows"].at[:, _half(half)][...] = (q * growth).astype(jnp.bfloat16)
        growth = k * growth * _along_rows(strength)
        scratch["k_rows"].at[:, _half(half)][...] = growth.astype(jnp.bfloat16)
        decay = jnp.exp2(gates)
        sent = ((Q_START, q * decay), (K_START, k * decay), (K_END, k * jnp.exp2(last - gates)))
        for i, (name, x) in enumerate(sent):
            _send(scratch, 3 * half + i, x, wide.at[name, :, _half(half)])


def _cumulate(g, head, token, length, gates) -> jax.Array:
    """Put G in base 2 into shared memory, a channel a thread; returns its last row."""
    steps = []
    for i in range(CHUNK):
        step = _load(g.at[token + jnp.minimum(i, length - 1), head], _CHANNEL)
        steps.append(jnp.where(i < length, jnp.maximum(step, LEAST_DECAY) * LOG2E, 0.0))
    total = steps[0]
    for i in range(CHUNK):
        total = total + steps[i] if i else total
        gates.at[i, pl.ds(0, DIM)][...] = total
    return total


def _own_anchor(gates, half: int) -> jax.Array:
    """The anchor of each row's own block, `[64, 64]`."""
    anchor = _anchor(gates, 0, half)
    for block in range(1, BLOCKS):
        anchor = jnp.where(_index(0) >= block * BLOCK, _anchor(gates, block, half), anchor)
    return anchor


def _anchor(gates, block: int, half: int) -> jax.Array:
    first = _load(gates.at[block * BLOCK, _half(half)], _WGMMA.reduce(0))
    return _spread(first - SHIFT, 1)


def _masked(raw, length) -> list[jax.Array]:
    """Both halves of the columns; zeros in the rows of no token, which may hold anything."""
    halves = (_load(raw.at[:, _half(half)], _WGMMA) for half in range(2))
    return [jnp.where(_index(0) < length, x, 0) for x in halves]


def _inverse_norm(halves: list[jax.Array]) -> jax.Array:
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1) for x in halves]
    return lax.rsqrt(squares[0] + squares[1] + 1e-6)


def _send(scratch, count: int, x: jax.Array, target) -> None:
    """Round a half matrix and copy it out, by one of two buffers in turn."""
    buffer = scratch["right" if count % 2 else "left"]
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    buffer[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)


def _pairs(scratch, keys, scale) -> tuple[jax.Array, jax.Array, jax.Array]:
    """beta_i A_ij [j, i] where j lies in an earlier block than i (bfloat16), and where in the same
    one ([64, 16] float32: row j, column i of its block); P^T (bfloat16)."""
    gates, buffers = scratch["gates"], (scratch["left"], scratch["right"])
    row, column = _index(0), _index(1)
    near = plgpu.layout_cast(jnp.zeros((CHUNK, BLOCK), jnp.float32), _WGMMA)
    nothing = plgpu.layout_cast(jnp.zeros((CHUNK, CHUNK), jnp.bfloat16), _WGMMA)
    erase = attend = nothing
    for block in range(BLOCKS):
        reached = row < (block + 1) * BLOCK

        def product(erased, attended, block=block, reached=reached):
            for half, buffer in enumerate(buffers):
                x = keys[half].astype(jnp.float32) * _along_rows(scale)
                x = x * jnp.exp2(_anchor(gates, block, half) - _gates(gates, half))
                buffer[...] = jnp.where(reached, x, 0.0).astype(jnp.bfloat16)
                plgpu.commit_smem()
                for acc, other in ((erased, "k_rows"), (attended, "q_rows")):
                    plgpu.wgmma(acc, buffer, scratch[other].at[:, _half(half)].T)
            return erased[...], attended[...]

        a, p = lax.optimization_barrier(pl.run_scoped(product, *[_accumulator()] * 2))
        # The buffers are free once all four warps have waited for their part of the products.
        plgpu.commit_smem()
        own = a[:, block * BLOCK : (block + 1) * BLOCK]
        near = jnp.where(_index(0, BLOCK) >= block * BLOCK, own, near)
        a, p = a.astype(jnp.bfloat16), p.astype(jnp.bfloat16)
        before = (column >= block * BLOCK) & (row < block * BLOCK)
        erase = jnp.where(before, a, erase)
        attend = jnp.where(column >= block * BLOCK, p, attend)
    return erase, near, jnp.where(row <= column, attend, 0)


def _inverted(scratch, erase, near, interpreted) -> jax.Array:
    """(I + L)^-1 transposed, float32, from L^T in two parts as `_pairs` leaves it."""
    scratch["erase"][...] = near
    plgpu.commit_smem()
    _substitute(scratch["erase"], scratch["inverse"], interpreted)
    plgpu.commit_smem()
    squares = [scratch[name].at[:, _half(half)] for name in ("k_rows", "q_rows") for half in (0, 1)]
    block = _load(scratch["inverse"], _WGMMA)
    inside = _index(0, BLOCK)
    diagonal = jnp.concatenate(
        [
            jnp.where((inside >= b * BLOCK) & (inside < (b + 1) * BLOCK), block, 0.0)
            for b in range(BLOCKS)
        ],
        axis=1,
    )
    squares[0][...] = erase
    squares[1][...] = diagonal.astype(jnp.bfloat16)
    plgpu.commit_smem()
    squares[2][...] = _product(squares[0], squares[1]).astype(jnp.bfloat16)
    plgpu.commit_smem()
    squares[3][...] = _product(squares[2], squares[2]).astype(jnp.bfloat16)
    plgpu.commit_smem()
    x = diagonal + _product(squares[1], squares[3])
    squares[0][...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    return x - _product(squares[0], squares[2])


def _substitute(erase, inverse, interpreted: bool) -> None:
    """inverse[16 b + c, i] = ((I + L_b)^-1)[i, c] where erase[16 b + s, i] = L_b[i, s], s < i."""
    column = plgpu.broadcasted_iota(jnp.int32, (BLOCKS, BLOCK), 1, layout=_BY_BLOCK)
    solved = []
    for i in range(BLOCK):
        x = jnp.where(column == i, 1.0, 0.0)
        for s in range(i):
            entry = _by_block(erase, s, i, interpreted)
            entry = lax.broadcast_in_dim(entry, (BLOCKS, BLOCK), (0,))
            x = x - plgpu.layout_cast(entry, _BY_BLOCK) * solved[s]
        solved.append(x)
    if interpreted:
        inverse[...] = jnp.stack(solved, axis=-1).reshape(CHUNK, BLOCK)
        return
    for i, x in enumerate(solved):
        inverse.reshape(BLOCKS, BLOCK, BLOCK).at[:, :, i][...] = x


def _by_block(erase, s: int, i: int, interpreted: bool) -> jax.Array:
    """L_b[i, s] of every block b. The interpreter cannot reshape references."""
    if interpreted:
        return erase[...].reshape(BLOCKS, BLOCK, BLOCK)[:, s, i]
    return _load(erase.reshape(BLOCKS, BLOCK, BLOCK).at[:, s, i], _BY_BLOCK.reduce(1))


def _product(a, b) -> jax.Array:
    def product(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    # Without the barrier, arithmetic may move ahead of the wait for the product.
    return lax.optimization_barrier(pl.run_scoped(product, _accumulator()))


def _accumulator() -> Any:
    return plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32)


def _half(half: int) -> Any:
    return pl.ds(half * HALF, HALF)


def _gates(gates, half: int) -> jax.Array:
    return _load(gates.at[:, _half(half)], _WGMMA)


def _index(axis: int, columns: int = HALF) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, columns), axis, layout=_WGMMA)


def _along_rows(x: jax.Array) -> jax.Array:
    """One number a row, `[64]`, as `[64, 64]`."""
    return _spread(x, 0)


def _spread(x: jax.Array, axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (CHUNK, HALF), (axis,)), _WGMMA)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
