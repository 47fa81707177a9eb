"""The device side of an engine: its memory, its compiled steps, host values made into batches."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float32, Int32

from dasc_jax.checkpoint_state import CheckpointPool
from dasc_jax.config import DascConfig
from dasc_jax.engine.buckets import Executables, abstract, decode_buckets, prefill_buckets, smallest
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.request import SamplingParams
from dasc_jax.engine.residency import Kept
from dasc_jax.engine.sampling import Sampled, Scores, log_probabilities, sample, sampling_batch
from dasc_jax.engine.step import (
    COMPILER_OPTIONS,
    Form,
    Memory,
    checkpoint_form,
    checkpoint_steps,
    init_pool,
    keep_masks,
    model_steps,
    repack,
)
from dasc_jax.layout import Quantization
from dasc_jax.model import Model, init_recurrent
from dasc_jax.models import PrefillBatch, State, init_pages
from dasc_jax.models.packing import PrefillBucket, Segment, pack_segments, page_rows
from dasc_jax.parallel import STATE_SPEC
from dasc_jax.plan import SelectionPlan

REPACKED = 16
"""Checkpoints that change their form in one step."""

SCORED = 64
"""Prompt tokens that are scored in one step: what bounds the logits held at once."""


def on_device(tree: Any, whole: NamedSharding | None = None) -> Any:
    """Copies of host arrays: the CPU client reads aligned ones in place, whatever may_alias is.

    `whole` puts all of them on every rank of a mesh; every process has the same.
    """

    def put(x: Any) -> jax.Array:
        x = np.array(x)
        if whole is None or whole.is_fully_addressable:
            return jax.device_put(x, whole)
        # device_put would ask the other processes whether they have the same.
        return jax.make_array_from_callback(x.shape, whole, lambda index: x[index])

    return jax.tree.map(put, tree)


class Device:
    """Owns `memory`; every method dispatches one step and replaces it."""

    def __init__(
        self, model: Model, config: EngineConfig, plan: SelectionPlan, checkpoint_slots: int
    ):
        self.model, self.config, self.slots = model, config, max(checkpoint_slots + 1, 2)
        mesh, dtype = model.mesh, jnp.dtype(model.dtype)
        self.whole = mesh and NamedSharding(mesh, PartitionSpec())
        state = State(
            init_recurrent(model.config, config.max_running + 1, model.dtype, mesh),
            init_pages(model.config, config.num_pages, dtype, mesh),
        )
        self.prefill_buckets = prefill_buckets(config)
        self.decode_buckets = decode_buckets(config)
        self.executables = Executables(config.strict_compile)
        steps = model_steps(model.config, model.dtype, mesh)
        self._prefill = jax.jit(steps.prefill, donate_argnums=0)
        self._decode = jax.jit(steps.decode, donate_argnums=0)
        self._score = jax.jit(steps.score)
        self._sample, self._logprobs = jax.jit(sample), jax.jit(log_probabilities)
        self._forms: dict[tuple[Form, Quantization], dict[tuple[str, Any], Any]] = {}
        self.memory = Memory(state, self._choose(plan, config.dasc))

    def _choose(self, plan: SelectionPlan, dasc: DascConfig) -> CheckpointPool:
        """Keep checkpoints in this form from now on; an empty pool for them, already allocated."""
        self.quantization: Quantization = dasc.quantization
        self.form = checkpoint_form(plan, self.model, dasc.placement)
        self.keep = keep_masks(self.form, self.model.config.delta.key_dim)
        steps = checkpoint_steps(self.form)
        self._store = jax.jit(steps.store, donate_argnums=0)
        self._load = jax.jit(steps.load, donate_argnums=0)
        size, dtype = (self.form, self.model.config, self.slots), jnp.dtype(self.model.dtype)
        pool = init_pool(*size, quantization=dasc.quantization, conv_dtype=dtype)
        return jax.block_until_ready(pool)

    def _put(self, tree: Any) -> Any:
        return on_device(tree, self.whole)

    def _abstract(self, *args: Any) -> Any:
        return abstract(args, self.whole)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every step of the closed set."""
        jobs: dict[tuple[str, Any], Callable[[], Any]] = {}
        for bucket in self.prefill_buckets:
            batch = pack_segments([], [], [], self.keep, bucket)
            jobs["prefill", bucket] = partial(self._compile_prefill, batch)
            jobs["score", bucket.tokens] = partial(self._compile_score, bucket.tokens)
        for size in self.decode_buckets:
            jobs["decode", size] = partial(self._compile_decode, self._decode_rows([], size))
        for rows in {*self.decode_buckets, *(bucket.rows for bucket in self.prefill_buckets)}:
            jobs["sample", rows] = partial(self._compile_sample, rows)
            jobs["logprobs", rows] = partial(self._compile_logprobs, rows)
        self.executables.warm(jobs | self._checkpoint_jobs(), progress)

    def _checkpoint_jobs(self) -> dict[tuple[str, Any], Callable[[], Any]]:
        """The steps that depend on the plan: small ones, without the model."""
        width = self.prefill_buckets[0].rows
        slots = np.zeros(width, np.int32)
        jobs: dict[tuple[str, Any], Callable[[], Any]] = {
            ("store", count): partial(self._compile_store, count)
            for count in {bucket.boundaries for bucket in self.prefill_buckets}
        }
        return jobs | {("load", width): partial(self._compile_load, slots, slots)}

    def adopt(self, plan: SelectionPlan, dasc: DascConfig, kept: Kept | None, drop: bool) -> None:
        """Keep checkpoints in another form from now on: those of `kept`, or none.

        The steps of the model stay compiled, those of a form are compiled once. What raises changes
        nothing; but with `drop` the pool in use goes before the new one comes, and is then lost.
        """
        if drop:
            self.memory = self.memory._replace(pool=None)
        before, compiled = dict(vars(self)), dict(self.executables.compiled)
        try:
            self.memory = self.memory._replace(pool=self._choose(plan, dasc))
            form = self.form, self.quantization
            if form not in self._forms:
                jobs = self._checkpoint_jobs()
                self.executables.warm(jobs)
                self._forms[form] = {key: self.executables.compiled[key] for key in jobs}
        except Exception:
            vars(self).update(before)
            self.executables.compiled = compiled
            raise
        self.executables.compiled.update(self._forms[form])
        if kept:
            self._repack(kept.plan, kept.pool, sorted(kept.meta))

    def _repack(self, exact: SelectionPlan, dense: CheckpointPool, slots: Sequence[int]) -> None:
        """Fill slots from those of `dense`, a float32 pool under a plan that drops nothing."""
        form = self._forms[self.form, self.quantization]
        for at in range(0, len(slots), REPACKED):
            chunk = _filled(slots[at : at + REPACKED], REPACKED)
            args = self.memory.pool, dense, self._put(chunk)
            if ("repack", REPACKED) not in form:
                # Every placement has room for a checkpoint that drops nothing in the same rows.
                whole = checkpoint_form(exact, self.model, "hybrid")
                run = jax.jit(partial(repack, self.form, whole), donate_argnums=0)
                form["repack", REPACKED] = run.lower(*abstract(args)).compile()
            self.memory = self.memory._replace(pool=form["repack", REPACKED](*args))
        jax.block_until_ready(self.memory.pool)  # what fails, fails here

    def prefill(
        self,
        segments: Sequence[Segment],
        boundaries: Sequence[tuple[int, int]],
        store_slots: Sequence[int],
        rows: Sequence[int],
        sampling: Sequence[SamplingParams],
        positions: Sequence[int],
    ) -> tuple[Sampled, jax.Array]:
        """Run packed segments, checkpoint `boundaries[i]` into `store_slots[i]`, sample `rows`.

        Returns what was sampled, and `[T, D]` to `score` other rows from.
        """
        tokens = sum(len(s.tokens) for s in segments)
        bucket: PrefillBucket = smallest(self.prefill_buckets, tokens, lambda b: b.tokens)
        batch = pack_segments(segments, boundaries, rows, self.keep, bucket)
        run = self.executables.get(("prefill", bucket), partial(self._compile_prefill, batch))
        state, out, states, hidden = run(self.memory.state, self.model.params, self._put(batch))
        self.memory = self.memory._replace(state=state)
        if any(store_slots):
            count = bucket.boundaries
            run = self.executables.get(("store", count), partial(self._compile_store, count))
            slots = self._put(_filled(store_slots, count))
            self.memory = self.memory._replace(pool=run(self.memory.pool, states, slots))
        return self._sampled(out, sampling, positions), hidden

    def _sampled(
        self, out: Sampled, sampling: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Sampled:
        """The tokens drawn where one is to be drawn: greedy batches need nothing behind a step."""
        if not any(params.temperature > 0 for params in sampling):
            return out
        rows = out.logits.shape[0]
        run = self.executables.get(("sample", rows), partial(self._compile_sample, rows))
        batch = self._put(sampling_batch(sampling, positions, rows))
        return out._replace(tokens=run(out.logits, batch))

    def logprobs(self, out: Sampled) -> Float32[np.ndarray, "R vocab"]:
        """Log-probabilities behind sampled rows, on the host."""
        rows = out.logits.shape[0]
        run = self.executables.get(("logprobs", rows), partial(self._compile_logprobs, rows))
        return np.asarray(run(out.logits))

    def score(self, hidden: jax.Array, rows: Sequence[int], targets: Sequence[int]) -> Scores:
        """How likely `targets[i]` is behind packed token `rows[i]` of a prefill; host arrays.

        Legal for at least one row.
        """
        tokens, parts = hidden.shape[0], []
        run = self.executables.get(("score", tokens), partial(self._compile_score, tokens))
        for at in range(0, len(rows), SCORED):
            chunk = slice(at, at + SCORED)
            args = _filled(rows[chunk], SCORED), _filled(targets[chunk], SCORED)
            parts.append(run(self.model.params, hidden, *self._put(args)))
        joined = (
            np.concatenate([np.asarray(x) for x in same]) for same in zip(*parts, strict=True)
        )
        return Scores(*(values[: len(rows)] for values in joined))

    def decode(
        self, rows: Sequence[tuple[int, int, int, Sequence[int], SamplingParams]]
    ) -> Sampled:
        """Run rows of (token, its position, slot, pages, sampling); samples the next position."""
        size = smallest(self.decode_buckets, len(rows), lambda b: b)
        packed = self._decode_rows(rows, size)
        run = self.executables.get(("decode", size), partial(self._compile_decode, packed))
        state, out = run(self.memory.state, self.model.params, self._put(packed))
        self.memory = self.memory._replace(state=state)
        return self._sampled(out, [row[4] for row in rows], [row[1] + 1 for row in rows])

    def load(self, checkpoints: Sequence[int], slots: Sequence[int]) -> None:
        """Unpack checkpoints into active slots, a few at a time."""
        width = self.prefill_buckets[0].rows
        for at in range(0, len(slots), width):
            args = (
                _filled(checkpoints[at : at + width], width),
                _filled(slots[at : at + width], width),
            )
            run = self.executables.get(("load", width), partial(self._compile_load, *args))
            state = run(self.memory.state, self.memory.pool, *self._put(args))
            self.memory = self.memory._replace(state=state)

    def _decode_rows(
        self, rows: Sequence[tuple[int, int, int, Sequence[int], SamplingParams]], size: int
    ) -> Int32[np.ndarray, "B C"]:
        """All that a step reads of the host in one array: every array is a transfer of its own."""
        packed = np.zeros((size, 3 + self.config.context_pages), np.int32)
        for at, row in enumerate(rows):
            packed[at, :3] = row[:3]
        packed[:, 3:] = page_rows([row[3] for row in rows], size, self.config.context_pages)
        return packed

    def _compile_prefill(self, batch: PrefillBatch) -> Any:
        args = self._abstract(self.memory.state, self.model.params, batch)
        return self._prefill.lower(*args).compile(COMPILER_OPTIONS)

    def _compile_sample(self, rows: int) -> Any:
        args = self._abstract(self._logits(rows), sampling_batch([], [], rows))
        return self._sample.lower(*args).compile()

    def _compile_logprobs(self, rows: int) -> Any:
        return self._logprobs.lower(*self._abstract(self._logits(rows))).compile()

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.model.config.vocab_size), jnp.float32)

    def _compile_score(self, tokens: int) -> Any:
        shape, dtype = (tokens, self.model.config.hidden_size), jnp.dtype(self.model.dtype)
        hidden, row = jax.ShapeDtypeStruct(shape, dtype), np.zeros(SCORED, np.int32)
        args = self._abstract(self.model.params, hidden, row, row)
        return self._score.lower(*args).compile(COMPILER_OPTIONS)

    def _compile_store(self, count: int) -> Any:
        mesh = self.model.mesh
        states = jax.eval_shape(partial(init_recurrent, self.model.config, count, self.model.dtype))
        states = abstract(states, mesh and NamedSharding(mesh, STATE_SPEC))
        args = self._abstract(self.memory.pool, states, np.zeros(count, np.int32))
        return self._store.lower(*args).compile()

    def _compile_decode(self, rows: np.ndarray) -> Any:
        args = self._abstract(self.memory.state, self.model.params, rows)
        return self._decode.lower(*args).compile(COMPILER_OPTIONS)

    def _compile_load(self, checkpoints: np.ndarray, slots: np.ndarray) -> Any:
        args = self._abstract(self.memory.state, self.memory.pool, checkpoints, slots)
        return self._load.lower(*args).compile()


def _filled(values: Sequence[int], width: int) -> np.ndarray:
    """`values` and then zeros, the sink, up to `width`."""
    out = np.zeros(width, np.int32)
    out[: len(values)] = values
    return out
