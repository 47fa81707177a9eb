"""Makers and walkers of a prefill in one launch, on Hopper: who is who, and how chunks change hands.

A maker makes some chunks ready, each on its own; a walker takes those of a run, in order, while
later ones are still being made. Multiprocessors start blocks in the order of their numbers, so a
walker is numbered behind the makers of its first chunks, and a lead of others. No later run has
walkers before the makers of this one have all been numbered: those that wait for a block that has
not started are of one run, and must be fewer than the multiprocessors.
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


class Plan(NamedTuple):
    """The blocks of a launch: walkers of a run, runs at most, and makers of the items (chunk,
    head), of which a maker does `side` by side and `turns` of them one after another; but the first
    makers, one a multiprocessor, do one each. As many 64ths of a run's makers as `lead` says are
    ahead of its walkers, or one a multiprocessor if that is more."""

    chunks: int
    heads: int
    side: int
    turns: int
    walkers: int
    runs: int
    sms: int
    lead: int = 0

    @property
    def makers(self) -> int:
        items = self.chunks * self.heads
        first = min(self.sms, -(-items // self.side))
        return first + -(-max(0, items - first * self.side) // (self.side * self.turns))

    @property
    def blocks(self) -> int:
        return self.makers + self.walkers * self.runs

    def items(self, maker) -> tuple[Any, Any]:
        """The first item of a maker, and the one past its last."""
        first = jnp.minimum(maker, self.sms) * self.side
        later = jnp.maximum(maker - self.sms, 0) * (self.side * self.turns)
        turns = jnp.where(maker < self.sms, 1, self.turns)
        stop = first + later + turns * self.side
        return first + later, jnp.minimum(stop, self.chunks * self.heads)

    def maker(self, item) -> Any:
        """Who makes an item."""
        later = lax.div(item - self.sms * self.side, self.side * self.turns) + self.sms
        return jnp.where(item < self.sms * self.side, lax.div(item, self.side), later)

    def place(self, run, first, stop) -> Any:
        """The number of a run's first walker, from its chunks; of no chunks, behind all makers."""
        if self.walkers >= self.sms:
            # They could keep the makers from every multiprocessor.
            return self.makers + run * self.walkers
        begin, end = (self.maker(chunk * self.heads) for chunk in (first, stop))
        lead = jnp.maximum(lax.div((end - begin) * self.lead, 64), self.sms)
        ahead = jnp.where(first < stop, begin + lead, self.makers)
        return jnp.minimum(ahead, self.makers) + run * self.walkers


class Role(NamedTuple):
    """Of a block: whether it walks; which of the makers it is, or which walker of which run."""

    walks: Any
    maker: Any
    run: Any
    walker: Any


def role(plan: Plan, runs: "Runs | None", block: Any) -> Role:
    """Of a block, by its number. Without `runs`, the only one has all chunks."""

    def place(run) -> jax.Array:
        if runs is None:
            return plan.place(run, jnp.int32(0), jnp.int32(plan.chunks))
        return plan.place(run, runs.first[run], runs.stop[run])

    def halve(_, span):
        low, high = span
        middle = lax.div(low + high, 2)
        behind = (low < high) & (place(jnp.minimum(middle, plan.runs - 1)) <= block)
        return jnp.where(behind, middle + 1, low), jnp.where(behind, high, middle)

    # How many runs have walkers up to here.
    span = jnp.int32(0), jnp.int32(plan.runs)
    begun = lax.fori_loop(0, plan.runs.bit_length(), halve, span)[0]
    run = jnp.maximum(begun - 1, 0)
    walker = block - place(run)
    walks = (begun > 0) & (walker < plan.walkers)
    return Role(walks, block - begun * plan.walkers, run, walker)


class Runs(NamedTuple):
    """A run is the chunks from one that starts at zero or at a slot to the last that continues or
    merges with what it left. first, stop `[N]`: its chunks, in their order; of as many runs as
    there are fewer than N, the last ones, none. written `[2]`: rows of final and of boundary states that some chunk
    writes, which are the first ones."""

    first: jax.Array
    stop: jax.Array
    written: jax.Array


def runs(table: ChunkTable, segments: int, num_boundaries: int) -> Runs:
    begins = (table.start != CONTINUE) & (table.start != MERGE)
    live = (table.length > 0) | (table.final < segments)
    order = jnp.arange(begins.shape[0])
    number = jnp.sum(begins & (order <= order[:, None]), axis=1)
    # One reduction for all counts of chunks: each is a kernel.
    row = jnp.arange(segments + 3)[:, None]
    written = jnp.where(row > segments + 1, table.boundary < num_boundaries, table.final < segments)
    counts = jnp.sum(jnp.where(row > segments, written, live & (number <= row)), axis=1)
    counts = counts.astype(jnp.int32)
    first, stop = counts[:segments], counts[1 : segments + 1]
    return Runs(first, stop, counts[segments + 1 :])


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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=returned)
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
            fence.proxy.async;
            }""",
            mgpu.utils.memref_ptr(marks),
            result_types=i32,
            has_side_effects=True,
            convergent=True,
        )
        return mgpu.FragmentedArray.splat(count, (), layout.to_mgpu(), is_signed=True)

    return acquire(marks.at[head, pl.ds(chunk, LANES)])
