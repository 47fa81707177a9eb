"""What the 64 tokens of a chunk are to each other under KDA, on Hopper, for every (chunk, head).

With G the cumulative log decay of the chunk, P_ij = q_i k_j e^(G_i - G_j) for j <= i, the same A of
keys, and solve = diag(beta) (I + tril(A, -1) diag(beta))^-1, none a function of a state:

    q_start = q e^G, k_start = -k e^G, update = solve^T (k e^(G_last - G)), bfloat16 [64, 128];
    attend^T bfloat16 [64, 64], attend = P solve; decay e^G_last, float32 [128].

With R = V + k_start S, outputs are q_start S + attend R and the next state is decay S + update^T R.

e^(-G) alone overflows, so a block b of 16 tokens has the anchor R_b = G[its first token] - 75:
e^(G_i - R_b) and e^(R_b - G_j) lie in [e^-75, e^75] within the block because a log decay counts as
-10 at least, and e^-10 of a state is below what bfloat16 operands resolve. An anchor knows no later
token, so appending tokens changes no earlier bit. For i in a later block c than j, e^(R_c - G_j) is
e^(R_b - G_j) times the square of e^((R_c - R_b) / 2): what underflows there is below e^-12.

Products are computed transposed, [j, i]: keys decayed to an anchor are the left operand, in
registers, a block of 16 rows a warp; the 16 rows of q or k of the anchor's block are the right one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chunks import CHUNK, Column
from pallas_kernels.mgpu.common import LANE, rows, seen
from pallas_kernels.mgpu.kda_gates import (
    ANCHOR,
    DIM,
    END,
    PADDED,
    REACH,
    START,
    cumulate,
    find_factors,
)
from pallas_kernels.mgpu.kda_solve import inverted
from pallas_kernels.mgpu.kda_tile import (
    BLOCK,
    BLOCKS,
    WGMMA,
    index,
    load,
    operand,
    own_rows,
    spread,
)

HALF = 64
PARAMS = LANE.replace(
    approx_math=True,
    # Threads read what others wrote only past a commit or a barrier that the kernel names.
    unsafe_no_auto_barriers=True,
)
SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
Q_START, K_START, UPDATE = range(3)


class Prepared(NamedTuple):
    """wide `[NC, H, 3, 64, 128]` bfloat16, indexed by the names above; attend^T `[NC, H, 64, 64]`
    bfloat16; decay `[NC, H, 128]` float32. What belongs to a chunk of length 0 is arbitrary."""

    wide: jax.Array
    attend: jax.Array
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
    """q, k `[T, H, 128]` bfloat16, raw; g `[T, H, 128]`, beta `[T, H]`; token, length `[NC]`.

    T is at least 64. A chunk's tokens are its first rows.
    """
    heads, chunks = q.shape[1], token.shape[0]

    def kda_prep(q, k, g, beta, token, length, wide, attend, decay, **scratch):
        item = lax.axis_index("item")
        chunk, head = lax.div(item, heads), lax.rem(item, heads)

        @pl.when(length[chunk] > 0)
        def _():
            target = Prepared(*(x.at[chunk, head] for x in (wide, attend, decay)))
            _chunk((q, k, g, beta), head, token[chunk], length[chunk], target, scratch)

    return Prepared(
        *plgpu.kernel(
            kda_prep,
            out_type=(
                jax.ShapeDtypeStruct((chunks, heads, 3, CHUNK, DIM), jnp.bfloat16),
                jax.ShapeDtypeStruct((chunks, heads, CHUNK, CHUNK), jnp.bfloat16),
                jax.ShapeDtypeStruct((chunks, heads, DIM), jnp.float32),
            ),
            scratch_types=_scratch(bool(interpret)),
            grid=(chunks * heads,),
            grid_names=("item",),
            compiler_params=PARAMS,
            interpret=interpret,
            kernel_name="kda_prep",
        )(q, k, g, beta, token, length)
    )


def _scratch(interpreted: bool) -> dict[str, Any]:
    matrix = plgpu.SMEM((CHUNK, DIM), jnp.bfloat16, transforms=SWIZZLED)
    halves = rows((2, CHUNK, HALF), jnp.bfloat16, interpreted)
    scratch = {
        "q_rows": halves,
        "k_rows": halves,
        "gates": plgpu.SMEM((CHUNK, PADDED), jnp.float32),
        "factors": plgpu.SMEM((REACH + BLOCKS - 1, BLOCKS, DIM), jnp.float32),
        "strength": plgpu.SMEM((2 * CHUNK,), jnp.float32),
        "k_end": matrix,
        "sent": plgpu.SMEM((2, CHUNK, HALF), jnp.bfloat16, transforms=SWIZZLED),
        "arrived": plgpu.Barrier(num_arrivals=4),
    }
    if interpreted:
        # It cannot reshape references.
        small = plgpu.SMEM((CHUNK, BLOCK), jnp.float32)
        scratch |= {"spare": matrix, "near": small, "inverse": small}
    return scratch


def _chunk(source, head, token, length, target, scratch) -> None:
    q, k, g, beta = source
    for x, name in ((q, "q_rows"), (k, "k_rows")):
        copied, _ = seen(scratch[name], "spare" in scratch)
        for half in range(2):
            source = x.at[pl.ds(token, CHUNK), head, _half(half)]
            plgpu.copy_gmem_to_smem(source, copied.at[half], scratch["arrived"])
    matrices = [_tiles(scratch, name) for name in ("q_rows", "k_rows")]
    _place_strengths(beta, head, token, scratch["strength"])
    for whole in (True, False):

        @pl.when((length == CHUNK) == whole)
        def _(whole=whole):
            cumulate(g, head, token, CHUNK if whole else length, scratch["gates"])

    find_factors(scratch["gates"], scratch["factors"], target.decay)
    plgpu.commit_smem()
    plgpu.barrier_wait(scratch["arrived"])

    @pl.when(length < CHUNK)
    def _():
        for x in (tiles.at[half] for tiles in matrices for half in range(2)):
            x[...] = jnp.where(index(0) < length, load(x, WGMMA), 0)
        plgpu.commit_smem()

    spare = scratch.get("spare")
    erased, attended = _pairs(scratch, target.wide, spare)
    strength = _strength(scratch["strength"], token, length, beta.shape[0], 1)
    erase, near, attend = _masked(erased, attended, spread(strength, 0, BLOCK))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    scratch["sent"].at[0][...] = attend
    squares = matrices[0].at[0], matrices[0].at[1], matrices[1].at[0]
    solve = inverted(erase, near, _smalls(scratch), squares, spare)
    strength = _strength(scratch["strength"], token, length, beta.shape[0], 0)
    _solved(scratch, (solve * spread(strength, 1)).astype(jnp.bfloat16), target, spare)


def _tiles(scratch, name: str) -> Any:
    """Both halves of the columns of a matrix, `[2, 64, 64]`, as products and loads see them."""
    return seen(scratch[name], "spare" in scratch)[1]


def _smalls(scratch) -> tuple[Any, Any]:
    """Two `[64, 16]` float32, in the place of factors that have served."""
    if "near" in scratch:
        return scratch["near"], scratch["inverse"]
    first, second = (scratch["factors"].at[pl.ds(i, 2)] for i in (0, 2))
    return first.reshape(CHUNK, BLOCK), second.reshape(CHUNK, BLOCK)


def _solved(scratch, solve, target, spare) -> None:
    """Send attend^T and update, from solve^T and what it multiplies."""

    def products(*accumulators):
        right = (*(scratch["k_end"].at[:, _half(half)] for half in (0, 1)), scratch["sent"].at[0])
        for acc, b in zip(accumulators, right, strict=True):
            plgpu.wgmma(acc, operand(solve, spare), b)
        return [acc[...] for acc in accumulators]

    accumulator = plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32)
    results = lax.optimization_barrier(pl.run_scoped(products, *[accumulator] * 3))
    # Nobody multiplies by what lay in these places any more.
    plgpu.commit_smem()
    update, attend = _tiles(scratch, "q_rows"), scratch["sent"].at[1]
    places = update.at[0], update.at[1], attend
    for place, x in zip(places, results, strict=True):
        place[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for half in range(2):
        plgpu.copy_smem_to_gmem(update.at[half], target.wide.at[UPDATE, :, _half(half)])
    plgpu.copy_smem_to_gmem(attend, target.attend)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _place_strengths(beta, head, token, strength) -> None:
    """The betas of 64 tokens, which are earlier ones where the chunk would reach past the last."""
    first = jnp.minimum(token, beta.shape[0] - CHUNK)
    loaded = load(beta.at[pl.ds(first, CHUNK), head], WGMMA.reduce(1))
    strength.at[pl.ds(0, CHUNK)][...] = loaded.astype(jnp.float32)


def _strength(strength, token, length, tokens: int, axis: int) -> jax.Array:
    """The betas of the chunk, zeros past its length, laid out for a product without `axis`."""
    first = token - jnp.minimum(token, tokens - CHUNK)
    layout = WGMMA.reduce(axis)
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
    return jnp.where(row < length, load(strength.at[pl.ds(first, CHUNK)], layout), 0.0)


def _pairs(scratch, wide, spare) -> tuple[list[jax.Array], list[jax.Array]]:
    """A^T and P^T, `[64, 16]` float32 for each block of columns; valid where j <= i."""
    scales = [_inverse_norm(_tiles(scratch, name)) for name in ("q_rows", "k_rows")]
    scales[0] = scales[0] * DIM**-0.5
    factors = scratch["factors"]

    def products(*accumulators):
        for half in range(2):
            reached = _decayed(scratch, scales, half, wide, spare)
            for block in range(BLOCKS):
                x = reached
                if block:
                    step = own_rows(factors.at[REACH + block - 1, :, _half(half)], spare)
                    x = x * step * step
                x = operand(x.astype(jnp.bfloat16), spare)
                own = pl.ds(block * BLOCK, BLOCK)
                for name, acc in zip(
                    ("k_rows", "q_rows"), accumulators[2 * block : 2 * block + 2], strict=True
                ):
                    plgpu.wgmma(acc, x, _tiles(scratch, name).at[half, own].T)
                # The operand of the block before last gives its registers back.
                plgpu.wgmma_wait(2)
        return [acc[...] for acc in accumulators]

    accumulator = plgpu.WGMMAAccumulatorRef((CHUNK, BLOCK), jnp.float32)
    done = lax.optimization_barrier(pl.run_scoped(products, *[accumulator] * (2 * BLOCKS)))
    return done[::2], done[1::2]


def _decayed(scratch, scales, half: int, wide, spare) -> jax.Array:
    """Send q_start and k_start, leave what products need; keys decayed to their own anchor."""
    columns, sent = _half(half), scratch["sent"]
    q_rows, k_rows = (_tiles(scratch, name).at[half] for name in ("q_rows", "k_rows"))
    anchor, start, end = (
        own_rows(scratch["factors"].at[name, :, columns], spare) for name in (ANCHOR, START, END)
    )
    exponent = load(scratch["gates"].at[:, columns], WGMMA) - anchor
    growth = jnp.exp2(exponent)
    q, k = (
        load(x, WGMMA).astype(jnp.float32) * spread(scale, 0)
        for x, scale in zip((q_rows, k_rows), scales, strict=True)
    )
    reached = k * jnp.exp2(-exponent)
    q, k = q * growth, k * growth
    q_rows[...] = q.astype(jnp.bfloat16)
    k_rows[...] = k.astype(jnp.bfloat16)
    if half:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for name, x in ((Q_START, q * start), (K_START, k * -start)):
        sent.at[name][...] = x.astype(jnp.bfloat16)
    scratch["k_end"].at[:, columns][...] = (reached * end).astype(jnp.bfloat16)
    plgpu.commit_smem()
    for name in (Q_START, K_START):
        plgpu.copy_smem_to_gmem(sent.at[name], wide.at[name, :, columns])
    return reached


def _masked(erased, attended, strength) -> tuple[jax.Array, jax.Array, jax.Array]:
    """beta_j A_ij [j, i] where j lies in an earlier block than i (bfloat16), and where in the same
    one ([64, 16] float32: row j, column i of its block); P^T (bfloat16)."""
    row = index(0, BLOCK)
    near, earlier = erased[0], []
    for block, x in enumerate(erased):
        near = jnp.where(row >= block * BLOCK, x, near)
        earlier.append(jnp.where(row < block * BLOCK, x * strength, 0.0))
    erase = jnp.concatenate(earlier, axis=1).astype(jnp.bfloat16)
    attend = jnp.where(index(0) <= index(1), jnp.concatenate(attended, axis=1), 0.0)
    return erase, near * strength, attend.astype(jnp.bfloat16)


def _inverse_norm(tiles) -> jax.Array:
    halves = (load(tiles.at[half], WGMMA).astype(jnp.float32) for half in range(2))
    first, second = (jnp.sum(jnp.square(x), axis=1) for x in halves)
    return lax.rsqrt(first + second + 1e-6)


def _half(half: int) -> Any:
    return pl.ds(half * HALF, HALF)
