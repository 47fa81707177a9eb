"""The device side of an engine: its memory, its compiled steps, host values made into batches."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dasc_jax.checkpoint_state import init_pool
from dasc_jax.engine.buckets import Executables, abstract, decode_buckets, prefill_buckets, smallest
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.request import SamplingParams
from dasc_jax.engine.sampling import Sampled, SamplingBatch, sampling_batch
from dasc_jax.engine.step import Memory, make_steps
from dasc_jax.model import Model, init_recurrent
from dasc_jax.models import DecodeBatch, PrefillBatch, State, init_pages
from dasc_jax.models.packing import PrefillBucket, Segment, pack_segments, page_rows
from dasc_jax.plan import SelectionPlan


def on_device(tree: Any) -> Any:
    """Copies of host arrays: the CPU client reads aligned ones in place, whatever may_alias is."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x)), tree)


class Device:
    """Owns `memory`; every method dispatches one step and replaces it."""

    def __init__(
        self, model: Model, config: EngineConfig, plan: SelectionPlan, checkpoint_slots: int
    ):
        self.model, self.config, self.plan = model, config, plan
        dtype = jnp.dtype(model.dtype)
        state = State(
            init_recurrent(model.config, config.max_running + 1, model.dtype),
            init_pages(model.config, config.num_pages, dtype),
        )
        pool = init_pool(
            plan,
            model.config,
            max(checkpoint_slots + 1, 2),
            quantization=config.dasc.quantization,
            conv_dtype=dtype,
        )
        self.memory = Memory(state, pool)
        self.keep = np.stack(
            [plan.mask(at, model.config.delta.key_dim) for at in range(plan.layers)]
        )
        self.prefill_buckets = prefill_buckets(config)
        self.decode_buckets = decode_buckets(config)
        self.executables = Executables(config.strict_compile)
        steps = make_steps(model.config, model.dtype, plan)
        self._prefill = jax.jit(steps.prefill, donate_argnums=0)
        self._decode = jax.jit(steps.decode, donate_argnums=0)
        self._load = jax.jit(steps.load, donate_argnums=0)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every step of the closed set."""
        jobs: dict[tuple[str, Any], Callable[[], Any]] = {}
        for bucket in self.prefill_buckets:
            batch = pack_segments([], [], [], self.keep, bucket)
            rows = sampling_batch([], [], bucket.rows)
            slots = np.zeros(bucket.boundaries, np.int32)
            jobs["prefill", bucket] = partial(self._compile_prefill, batch, rows, slots)
        for size in self.decode_buckets:
            jobs["decode", size] = partial(self._compile_decode, *self._decode_arrays([], size))
        width = self.prefill_buckets[0].rows
        jobs["load", width] = partial(self._compile_load, *(np.zeros(width, np.int32),) * 2)
        self.executables.warm(jobs, progress)

    def prefill(
        self,
        segments: Sequence[Segment],
        boundaries: Sequence[tuple[int, int]],
        store_slots: Sequence[int],
        rows: Sequence[int],
        sampling: Sequence[SamplingParams],
        positions: Sequence[int],
    ) -> Sampled:
        """Run packed segments, checkpoint `boundaries[i]` into `store_slots[i]`, sample `rows`."""
        tokens = sum(len(s.tokens) for s in segments)
        bucket: PrefillBucket = smallest(self.prefill_buckets, tokens, lambda b: b.tokens)
        batch = pack_segments(segments, boundaries, rows, self.keep, bucket)
        slots = np.zeros(bucket.boundaries, np.int32)
        slots[: len(store_slots)] = store_slots
        args = (batch, sampling_batch(sampling, positions, bucket.rows), slots)
        run = self.executables.get(("prefill", bucket), partial(self._compile_prefill, *args))
        batch, rows_of, slots = on_device(args)
        self.memory, out = run(self.memory, self.model.params, batch, rows_of, slots)
        return out

    def decode(
        self, rows: Sequence[tuple[int, int, int, Sequence[int], SamplingParams]]
    ) -> Sampled:
        """Run rows of (token, its position, slot, pages, sampling); samples the next position."""
        size = smallest(self.decode_buckets, len(rows), lambda b: b)
        args = self._decode_arrays(rows, size)
        run = self.executables.get(("decode", size), partial(self._compile_decode, *args))
        state, out = run(self.memory.state, self.model.params, *on_device(args))
        self.memory = self.memory._replace(state=state)
        return out

    def load(self, checkpoints: Sequence[int], slots: Sequence[int]) -> None:
        """Unpack checkpoints into active slots, a few at a time."""
        width = self.prefill_buckets[0].rows
        for at in range(0, len(slots), width):
            args = (
                _filled(checkpoints[at : at + width], width),
                _filled(slots[at : at + width], width),
            )
            run = self.executables.get(("load", width), partial(self._compile_load, *args))
            state = run(self.memory.state, self.memory.pool, *on_device(args))
            self.memory = self.memory._replace(state=state)

    def _decode_arrays(
        self, rows: Sequence[tuple[int, int, int, Sequence[int], SamplingParams]], size: int
    ) -> tuple[DecodeBatch, SamplingBatch]:
        tokens, positions, slots = (np.zeros(size, np.int32) for _ in range(3))
        for at, row in enumerate(rows):
            tokens[at], positions[at], slots[at] = row[:3]
        table = page_rows([row[3] for row in rows], size, self.config.context_pages)
        sampling = sampling_batch([row[4] for row in rows], [row[1] + 1 for row in rows], size)
        return DecodeBatch(tokens, positions, slots, table), sampling

    def _compile_prefill(self, batch: PrefillBatch, rows: SamplingBatch, slots: np.ndarray) -> Any:
        args = abstract((self.memory, self.model.params, batch, rows, slots))
        return self._prefill.lower(*args).compile()

    def _compile_decode(self, batch: DecodeBatch, rows: SamplingBatch) -> Any:
        args = abstract((self.memory.state, self.model.params, batch, rows))
        return self._decode.lower(*args).compile()

    def _compile_load(self, checkpoints: np.ndarray, slots: np.ndarray) -> Any:
        args = abstract((self.memory.state, self.memory.pool, checkpoints, slots))
        return self._load.lower(*args).compile()


def _filled(values: Sequence[int], width: int) -> np.ndarray:
    """`values` and then zeros, the sink, up to `width`."""
    out = np.zeros(width, np.int32)
    out[: len(values)] = values
    return out
