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
from pallas_kernels.mgpu.common import LANE
from pallas_kernels.mgpu.kda_fetch import (
    HALF,
    Source,
    describe,
    fetch,
    find_item,
    place_strengths,
    read_strengths,
    strengths,
)
from pallas_kernels.mgpu.kda_gates import (
    ANCHOR,
    DIM,
    END,
    REACH,
    START,
    cumulate,
    find_factors,
)
from pallas_kernels.mgpu.kda_room import parts, scratch_types
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

PARAMS = LANE.replace(
    approx_math=True,
    # Threads read what others wrote only past a commit or a barrier that the kernel names.
    unsafe_no_auto_barriers=True,
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
    blocks: int,
    interpret: Any = None,
) -> Prepared:
    """q, k `[T, H, 128]` bfloat16, raw; g `[T, H, 128]`, beta `[T, H]`; token, length `[NC]`.

    T is at least 64. A chunk's tokens are its first rows. `blocks` of threads share the work.
    """
    heads, chunks = q.shape[1], token.shape[0]
    blocks = min(blocks, chunks * heads)

    def kda_prep(*refs, **scratch):
        inputs = len(Source._fields)
        source, target = Source(*refs[:inputs]), Prepared(*refs[inputs:])
        scratch |= parts(scratch)

        def visit(item) -> jax.Array:
            return _visit(source, item, blocks, target, scratch)

        first = find_item(source, lax.axis_index("block"), blocks)

        @pl.when(first < source.items)
        def _():
            begun = describe(source, first)
            fetch(source, begun, scratch)
            begun_strengths = read_strengths(source, begun)
            place_strengths(begun_strengths, scratch["strength"].at[0], source, begun)

        lax.while_loop(lambda item: item < source.items, visit, first)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return Prepared(
        *plgpu.kernel(
            kda_prep,
            out_type=(
                jax.ShapeDtypeStruct((chunks, heads, 3, CHUNK, DIM), jnp.bfloat16),
                jax.ShapeDtypeStruct((chunks, heads, CHUNK, CHUNK), jnp.bfloat16),
                jax.ShapeDtypeStruct((chunks, heads, DIM), jnp.float32),
            ),
            scratch_types=scratch_types(g.dtype, bool(interpret)),
            grid=(blocks,),
            grid_names=("block",),
            compiler_params=PARAMS,
            interpret=interpret,
            kernel_name="kda_prep",
        )(q, k, g, beta, token, length)
    )


def _visit(source: Source, number, blocks: int, targets: Any, scratch) -> jax.Array:
    """Make an item ready and fetch the next one, whose number it returns."""
    item, spare = describe(source, number), scratch.get("spare")
    places: Any = (x.at[item.chunk, item.head] for x in targets)
    target = Prepared(*places)
    # Zero, which the compiler does not know: addresses that are the same in every turn would stay
    # in registers, of which there are none to spare.
    zero = jnp.minimum(item.length, 0)
    varying = "q_rows", "k_rows", "k_end", "sent", "square", "strength"
    turn = scratch | {name: scratch[name].at[zero] for name in varying}
    plgpu.barrier_wait(turn["arrived"])
    cumulate(turn["steps"], item.length, turn["gates"])
    find_factors(turn["gates"], turn["factors"], target.decay)
    _cut(item.length, turn)
    plgpu.commit_smem()
    erased, attended = _pairs(turn, target.wide, spare)
    strength = strengths(turn["strength"], item, 1)
    erase, near, attend = _masked(erased, attended, spread(strength, 0, BLOCK), zero)
    # Behind this wait nobody multiplies by rows of q or k.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    following = find_item(source, number + blocks, blocks)
    ahead = describe(source, following)

    @pl.when(following < source.items)
    def _():
        fetch(source, ahead, scratch)

    ahead_strengths = read_strengths(source, ahead)
    turn["sent"].at[0][...] = attend
    squares = turn["sent"].at[1], turn["square"]
    solve = inverted(erase, near, (turn["near"], turn["inverse"]), squares, spare)
    strength = strengths(turn["strength"], item, 0)
    _solved(turn, (solve * spread(strength, 1)).astype(jnp.bfloat16), target, spare)
    place_strengths(ahead_strengths, turn["strength"], source, ahead)
    return following


def _cut(length, scratch) -> None:
    """Zeros for the rows of q and k behind the chunk's."""

    @pl.when(length < CHUNK)
    def _():
        for name in ("q_rows", "k_rows"):
            for half in range(2):
                x = scratch[name].at[half]
                x[...] = jnp.where(index(0) < length, load(x, WGMMA), 0)


def _solved(scratch, solve, target, spare) -> None:
    """Send attend^T and update, from solve^T and what it multiplies."""
    update, sent = scratch["k_end"], scratch["sent"]

    def products(*accumulators):
        right = (*(update.at[:, _half(half)] for half in (0, 1)), sent.at[0])
        for acc, b in zip(accumulators, right, strict=True):
            plgpu.wgmma(acc, operand(solve, spare), b)
        return [acc[...] for acc in accumulators]

    accumulator = plgpu.WGMMAAccumulatorRef((CHUNK, CHUNK), jnp.float32)
    results = lax.optimization_barrier(pl.run_scoped(products, *[accumulator] * 3))
    # Nobody multiplies by what lay in these places any more.
    plgpu.commit_smem()
    places = *(update.at[:, _half(half)] for half in (0, 1)), sent.at[1]
    for place, x in zip(places, results, strict=True):
        place[...] = x.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(update, target.wide.at[UPDATE])
    plgpu.copy_smem_to_gmem(sent.at[1], target.attend)


def _pairs(scratch, wide, spare) -> tuple[list[jax.Array], list[jax.Array]]:
    """A^T and P^T, `[64, 16]` float32 for each block of columns; valid where j <= i."""
    scales = [_inverse_norm(scratch[name]) for name in ("q_rows", "k_rows")]
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
                    plgpu.wgmma(acc, x, scratch[name].at[half, own].T)
                # The operand of the block before last gives its registers back, and the last one
                # of a half before those of `_decayed` are many.
                plgpu.wgmma_wait(2 if block < BLOCKS - 1 else 0)
        return [acc[...] for acc in accumulators]

    accumulator = plgpu.WGMMAAccumulatorRef((CHUNK, BLOCK), jnp.float32)
    done = lax.optimization_barrier(pl.run_scoped(products, *[accumulator] * (2 * BLOCKS)))
    return done[::2], done[1::2]


def _decayed(scratch, scales, half: int, wide, spare) -> jax.Array:
    """Send q_start and k_start, leave what products need; keys decayed to their own anchor."""
    columns, sent = _half(half), scratch["sent"]
    q_rows, k_rows = (scratch[name].at[half] for name in ("q_rows", "k_rows"))
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
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for name, x in ((Q_START, q * start), (K_START, k * -start)):
        sent.at[name][...] = x.astype(jnp.bfloat16)
    scratch["k_end"].at[:, columns][...] = (reached * end).astype(jnp.bfloat16)
    plgpu.commit_smem()
    for name in (Q_START, K_START):
        plgpu.copy_smem_to_gmem(sent.at[name], wide.at[name, :, columns])
    return reached


def _masked(erased, attended, strength, zero) -> tuple[jax.Array, jax.Array, jax.Array]:
    """beta_j A_ij [j, i] where j lies in an earlier block than i (bfloat16), and where in the same
    one ([64, 16] float32: row j, column i of its block); P^T (bfloat16)."""
    row, column = index(0, BLOCK) + zero, index(1, BLOCK)
    near, earlier, kept = erased[0], [], []
    for block, (x, y) in enumerate(zip(erased, attended, strict=True)):
        first = block * BLOCK
        near = jnp.where(row >= first, x, near)
        earlier.append(jnp.where(row < first, x * strength, 0.0))
        kept.append(jnp.where(row - first <= column, y, 0.0))
    erase, attend = (jnp.concatenate(x, axis=1).astype(jnp.bfloat16) for x in (earlier, kept))
    return erase, near * strength, attend


def _inverse_norm(tiles) -> jax.Array:
    halves = (load(tiles.at[half], WGMMA).astype(jnp.float32) for half in range(2))
    first, second = (jnp.sum(jnp.square(x), axis=1) for x in halves)
    return lax.rsqrt(first + second + 1e-6)


def _half(half: int) -> Any:
    return pl.ds(half * HALF, HALF)
