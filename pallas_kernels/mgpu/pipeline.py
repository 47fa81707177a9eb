"""Makers and walkers of a prefill in one launch, on Hopper, and how chunks change hands.

A maker makes some chunks ready, each on its own; a walker takes those of a run, in order. Blocks
start in the order of their numbers. A run of more than half of all chunks has its walkers among the
makers, behind its first ones and as many as there are multiprocessors: it is walked while it is
being made. With many runs the walkers alone fill the multiprocessors, and come behind all makers.
So those that wait for a block that has not started are of one run, and must leave most of the
multiprocessors to makers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.chunks import CONTINUE, MERGE, ChunkTable

LANES = 32


def multiprocessors() -> int:
    """Of the GPU; where there is none, of an H100 or H200."""
    return getattr(jax.devices()[0], "core_count", None) or 132


class Runs(NamedTuple):
    """A run is the chunks from one that starts at zero or at a slot to the last that continues or
    merges with what it left. first, stop `[N]`: its chunks, the longest run first; of as many runs
    as there are fewer than N, none. counts `[3]`: rows of final and of boundary states that some
    chunk writes, which are the first ones, and chunks of all runs."""

    first: jax.Array
    stop: jax.Array
    counts: jax.Array


def runs(table: ChunkTable, segments: int, num_boundaries: int) -> Runs:
    begins = (table.start != CONTINUE) & (table.start != MERGE)
    live = (table.length > 0) | (table.final < segments)
    order, run = jnp.arange(begins.shape[0]), jnp.arange(segments)
    number = jnp.sum(begins & (order <= order[:, None]), axis=1)
    # One reduction for all counts of chunks: each is a kernel.
    row = jnp.arange(segments + 3)[:, None]
    written = jnp.where(row > segments + 1, table.boundary < num_boundaries, table.final < segments)
    counts = jnp.sum(jnp.where(row > segments, written, live & (number <= row)), axis=1)
    bounds = jnp.stack([counts[:segments], counts[1 : segments + 1]])
    length = bounds[1] - bounds[0]
    before = (length > length[:, None]) | ((length == length[:, None]) & (run < run[:, None]))
    chosen = jnp.sum(before, axis=1) == run[:, None]
    first, stop = jnp.sum(jnp.where(chosen, bounds[:, None], 0), axis=2).astype(jnp.int32)
    all_chunks = counts[segments : segments + 1]
    return Runs(
        first, stop, jnp.concatenate([counts[segments + 1 :], all_chunks]).astype(jnp.int32)
    )


class Plan(NamedTuple):
    """The blocks of a launch: makers, of `side` items (chunk, head) each, of all chunks and
    `heads`; walkers of a run; runs at most; and multiprocessors."""

    chunks: int
    heads: int
    side: int
    walkers: int
    runs: int
    sms: int

    @property
    def makers(self) -> int:
        return -(-self.chunks * self.heads // self.side)

    @property
    def blocks(self) -> int:
        return self.makers + self.walkers * self.runs

    def ahead(self, found: Runs | None) -> Any:
        """How many makers are ahead of the walkers of the longest run; without `found`, the only
        one has all chunks."""
        if 5 * self.walkers > 3 * self.sms:
            # Walkers that wait keep their multiprocessors: they would starve the makers.
            return self.makers
        if found is None:
            return min(self.sms, self.makers)
        first, stop = found.first[0], found.stop[0]
        begun = lax.div(first * self.heads, self.side) + self.sms
        most = 2 * (stop - first) > found.counts[2]
        return jnp.where(most, jnp.minimum(begun, self.makers), self.makers)


class Role(NamedTuple):
    """Of a block: whether it walks; which of the makers it is, or which walker of which run."""

    walks: Any
    maker: Any
    run: Any
    walker: Any


def role(plan: Plan, found: Runs | None, block: Any) -> Role:
    """Of a block, by its number: makers, walkers of the longest run, the other makers, and the
    walkers of other runs."""
    ahead = plan.ahead(found)
    maker = jnp.where(block < ahead, block, block - plan.walkers)
    walker = block - jnp.where(maker < plan.makers, ahead, plan.makers)
    walks = (block >= ahead) & ((walker < plan.walkers) | (maker >= plan.makers))
    return Role(walks, maker, lax.div(walker, plan.walkers), lax.rem(walker, plan.walkers))


def new_marks(chunks: int, heads: int) -> jax.Array:
    """What `publish` and `await_ready` share, for every head and chunk: 0 until it is ready. Behind
    the last chunk are zeros for all that a look ahead sees."""
    return jnp.zeros((heads, chunks + LANES), jnp.int32)


def publish(marks: Any, head: Any, chunk: Any, interpret: Any) -> None:
    """Let walkers have what this warpgroup has stored of a chunk. All of its threads call it, past
    the barrier of `wait_smem_to_gmem(0)`, which their copies and stores must precede."""
    if interpret:
        marks[head, chunk] = jnp.int32(1)
        return

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))

    @inline
    def release(ctx, mark):
        del ctx
        mgpu.utils.inline_ptx(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, 127;
            setp.eq.u32 first, thread, 0;
            @first fence.proxy.async;
            @first st.release.gpu.global.b32 [$0], 1;
            }""",
            mgpu.utils.memref_ptr(mark),
            has_side_effects=True,
        )

    release(marks.at[head, pl.ds(chunk, 1)])


def await_ready(marks: Any, head: Any, chunk: Any, interpret: Any) -> Any:
    """Wait until a chunk is ready; how many from it on are ready, up to 32. Only copies that this
    thread starts afterwards may read them. Warps may get different answers."""
    if interpret:
        # Blocks are interpreted in their order.
        return jnp.int32(LANES)
    layout = plgpu.Layout.WG_SPLAT(())
    returned = plgpu.ShapeDtypeStruct((), jnp.int32, layout=layout)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=returned)

    @inline
    def acquire(ctx, marks):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        count = mgpu.utils.inline_ptx(
            """{
            .reg .pred set;
            .reg .b32 lane, mark;
            .reg .b64 place;
            mov.u32 lane, %laneid;
            mul.wide.u32 place, lane, 4;
            add.u64 place, place, $1;
            look_${:uid}:
            ld.relaxed.gpu.global.b32 mark, [place];
            setp.ne.b32 set, mark, 0;
            vote.sync.ballot.b32 mark, set, 0xffffffff;
            not.b32 mark, mark;
            brev.b32 mark, mark;
            clz.b32 $0, mark;
            setp.eq.u32 set, $0, 0;
            @set bra look_${:uid};
            fence.acq_rel.gpu;
            bar.warp.sync 0xffffffff;
            fence.proxy.async;
            }""",
            mgpu.utils.memref_ptr(marks),
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(count, (), layout.to_mgpu(), is_signed=True)

    return acquire(marks.at[head, pl.ds(chunk, LANES)])
