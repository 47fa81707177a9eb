"""The serving loop, single threaded: receive, schedule, forward, publish; `step` is all of it."""

import logging
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dasc_jax.checkpoint_state import units
from dasc_jax.config import DascConfig
from dasc_jax.engine.active import Active, lay_out, most_likely
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.dispatch import Device
from dasc_jax.engine.request import CacheReport, FinishReason, RequestResult, TokenEvent
from dasc_jax.engine.residency import Holding, Kept, Residency
from dasc_jax.engine.sampling import Sampled
from dasc_jax.engine.scheduler import Piece, next_step, prefill_pieces
from dasc_jax.engine.step import check_order, ordered
from dasc_jax.horizons import retention_horizons
from dasc_jax.layout import account
from dasc_jax.model import Model
from dasc_jax.parallel import rank_count
from dasc_jax.plan import SelectionPlan, check_plan, make_plan

log = logging.getLogger(__name__)


def checkpoint_slots(model: Model, config: EngineConfig, plan: SelectionPlan) -> int:
    """Usable slots of the checkpoint pool, from a count or a byte budget a rank (DASC Eq. 8).

    Raises:
        ValueError: a budget too small for one checkpoint besides slot 0, with both sizes.
    """
    if config.checkpoint_bytes is None:
        wanted = config.checkpoint_slots
        return 4 * config.max_running if wanted is None else wanted
    stored = replace(model.config, dtype=model.dtype)
    dasc = config.dasc
    acc = account(stored, plan, rank_count(model.mesh), dasc.placement, dasc.quantization)
    slots = acc.slots(config.checkpoint_bytes)
    if slots < 1:
        raise ValueError(
            f"checkpoint_bytes is {config.checkpoint_bytes}; slot 0 and one checkpoint take"
            f" {2 * acc.bytes_per_slot} bytes"
        )
    return slots


class Loop:
    """All requests of an engine and one device step at a time. Not thread safe.

    `digest` is a checksum of all tokens sampled and all forms of checkpoints adopted so far.

    Raises:
        ConfigError, ValueError: sizes that do not fit together, before anything is allocated.
    """

    def __init__(
        self, model: Model, config: EngineConfig, progress: Callable[[int, int], None] | None = None
    ):
        self.config, dasc = config, config.dasc
        horizons = retention_horizons(model, eps=dasc.eps, a=dasc.a)
        self.plan = make_plan(horizons, config.w_max, eps=dasc.eps, a=dasc.a)
        config.check_model(model.config, self.plan.window)
        slots = checkpoint_slots(model, config, self.plan)
        self.model = model = ordered(model, self.plan, dasc.placement)
        self.device = Device(model, config, self.plan, slots)
        self.residency = Residency(config, self.plan, slots)
        self.device.warm_up(progress)
        self.waiting: dict[str, Active] = {}
        self.prefilling: dict[str, Active] = {}
        self.decoding: dict[str, Active] = {}
        self.counters: Counter[str] = Counter()
        self.digest = 0
        self._previous: Literal["prefill", "decode"] = "decode"

    def receive(self, active: Active) -> None:
        """Queue a request; an id in use ends the newcomer with an error."""
        key = active.request.id
        if key in self.waiting or key in self.prefilling or key in self.decoding:
            self._end(active, "error", f"request id {key!r} is in use")
        else:
            self.waiting[key] = active

    def abort(
        self, request_id: str, reason: FinishReason = "abort", error: str | None = None
    ) -> None:
        """End a request wherever it is; one that has ended already is left alone."""
        for stage in (self.waiting, self.prefilling, self.decoding):
            if request_id in stage:
                self._end(stage.pop(request_id), reason, error)

    def abort_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request."""
        for request_id in [*self.waiting, *self.prefilling, *self.decoding]:
            self.abort(request_id, reason, error)

    def flush(self) -> bool:
        """Forget all cached prefixes; False, with nothing done, while requests run or wait."""
        if self.waiting or self.prefilling or self.decoding:
            return False
        self.residency.flush()
        return True

    def keep(self) -> Kept:
        """See `Engine.keep`."""
        self._require_idle()
        return self.residency.keep(jax.tree.map(jnp.copy, self.device.memory.pool))

    def adopt(self, kept: Kept | None, dasc: DascConfig, plan: SelectionPlan | None) -> None:
        """See `Engine.adopt`."""
        self._require_idle()
        config = replace(self.config, dasc=dasc)
        horizons = retention_horizons(self.model, eps=dasc.eps, a=dasc.a)
        plan = plan or make_plan(horizons, config.w_max, eps=dasc.eps, a=dasc.a)
        check_plan(plan, horizons)
        config.check_model(self.model.config, plan.window)
        if dasc.policy == "dense":
            units(plan, "dense")
        check_order(self.model, dasc.placement)
        self.residency.require_adoptable(kept)
        # What is kept is a pool of its own: the one in use goes before a third one comes.
        last = self.residency.kept
        try:
            self.device.adopt(plan, dasc, kept, drop=last is not None)
        except Exception as error:
            if last:
                traceback.clear_frames(error.__traceback__)  # they may hold parts of the new pool
                self.device.adopt(self.plan, self.config.dasc, last, drop=True)
                self.residency.adopt(last, self.config, self.plan)
            raise
        self.residency.adopt(kept, config, plan)
        self.config, self.plan = config, plan
        self.digest = zlib.crc32(f"{plan.id} {dasc}".encode(), self.digest)

    def _require_idle(self) -> None:
        if self.waiting or self.prefilling or self.decoding:
            raise ValueError("requests run or wait")

    def step(self) -> bool:
        """Admit, then run one device step; False when there was nothing to run."""
        self._admit()
        kind = next_step(len(self.prefilling), len(self.decoding), self._previous)
        if kind == "idle":
            return False
        self._previous = kind
        if kind == "prefill":
            self._prefill()
        else:
            self._decode()
        return True

    def stats(self) -> dict[str, float]:
        """Counters and gauges; O(1) in the size of the pools."""
        return {
            "running": float(len(self.prefilling) + len(self.decoding)),
            "waiting": float(len(self.waiting)),
            "compiled_after_warmup": float(self.device.executables.late),
            **{key: float(value) for key, value in self.counters.items()},
            **self.residency.stats(),
        }

    def _admit(self) -> None:
        """Admit in order of arrival while slots and pages last; load what was hit in one step."""
        loads: list[Holding] = []
        for key, active in list(self.waiting.items()):
            held = self.residency.admit(active.request, np.asarray(active.tokens, np.int32))
            if held is None:
                break
            del self.waiting[key]
            active.held, active.done = held, held.report.hit_depth
            self.prefilling[key] = active
            self.counters["prompt_tokens"] += len(active.tokens)
            self.counters["cached_tokens"] += active.done
            self.counters[f"lookup_{held.report.reason}"] += 1
            if held.load_slot:
                loads.append(held)
        self.device.load([held.load_slot for held in loads], [held.slot for held in loads])
        for held in loads:
            self.residency.loaded(held)

    def _prefill(self) -> None:
        bucket = self.device.prefill_buckets[-1]
        waiting = [active.progress() for active in self.prefilling.values()]
        pieces = prefill_pieces(waiting, bucket.tokens, bucket.rows)
        work = lay_out(pieces, self.prefilling, self.residency.checkpoint_slot)
        out, hidden = self.device.prefill(*work)
        for piece, last in zip(pieces, work.rows, strict=True):
            self._score(self.prefilling[piece.id], piece, hidden, last)
        ended: list[tuple[int, Active]] = []
        for row, piece in enumerate(pieces):
            active = self.prefilling[piece.id]
            self.counters["prefilled_tokens"] += piece.stop - piece.start
            self.counters["replayed_tokens"] += piece.replay
            active.done, active.holding.replay = piece.stop, 0
            if piece.stop == len(active.request.prompt):
                self.residency.publish(active.request, active.holding, active.tokens)
                self.decoding[piece.id] = self.prefilling.pop(piece.id)
                ended.append((row, active))
        if ended:
            self._emit(out, ended)

    def _score(self, active: Active, piece: Piece, hidden: jax.Array, last: int) -> None:
        """Log-probabilities of the prompt tokens behind those of `piece`, where they are wanted.

        `last` is the packed index of the piece's last token.
        """
        count = active.request.sampling.prompt_logprobs
        targets = active.request.prompt[piece.start + 1 : piece.stop + 1]
        if count is None or not targets:
            return
        first = last + 1 - (piece.stop - piece.start)
        scores = self.device.score(hidden, range(first, first + len(targets)), targets)
        for chosen, top, tokens in zip(*(x.tolist() for x in scores), strict=True):
            likeliest = dict(zip(tokens[:count], top[:count], strict=True))
            active.prompt_logprobs.append((chosen, likeliest))

    def _decode(self) -> None:
        actives = list(self.decoding.values())
        rows = []
        for active in actives:
            held = active.holding
            rows.append(
                (active.tokens[-1], active.done, held.slot, held.pages, active.request.sampling)
            )
            active.done += 1
        self._emit(self.device.decode(rows), list(enumerate(actives)))

    def _emit(self, out: Sampled, rows: Sequence[tuple[int, Active]]) -> None:
        """Hand sampled tokens to their requests and end those that are complete."""
        tokens = np.asarray(out.tokens)
        self.digest = zlib.crc32(tokens[[row for row, _ in rows]].tobytes(), self.digest)
        wanted = any(active.request.sampling.logprobs is not None for _, active in rows)
        logprobs = self.device.logprobs(out) if wanted else None
        now = time.perf_counter()
        for row, active in rows:
            token, chosen, top = int(tokens[row]), None, None
            active.tokens.append(token)
            active.first_token = active.first_token or now
            self.counters["generated_tokens"] += 1
            count = active.request.sampling.logprobs
            if logprobs is not None and count is not None:
                chosen, top = float(logprobs[row, token]), most_likely(logprobs[row], count)
                active.logprobs.append((chosen, top))
            reason = active.ends_with(token, self.model.config.eos_token_ids)
            prompt = active.prompt_scores() if len(active.generated) == 1 else None
            if reason is None:
                self._tell(active, TokenEvent(active.request.id, token, chosen, top, None, prompt))
                continue
            del self.decoding[active.request.id]
            self.residency.publish(active.request, active.holding, active.tokens[:-1])
            result = self._result(active, reason, None)
            self._tell(active, TokenEvent(active.request.id, token, chosen, top, result, prompt))

    def _end(self, active: Active, reason: FinishReason, error: str | None) -> None:
        """End a request without a token of its own: aborted, refused or failed."""
        result = self._result(active, reason, error)
        self._tell(active, TokenEvent(active.request.id, None, None, None, result))

    def _tell(self, active: Active, event: TokenEvent) -> None:
        """Hand an event over; a receiver that raises loses its request, and nobody else does."""
        try:
            active.on_event(event)
        except Exception:
            log.exception("on_event of request %r failed", event.id)
            if event.result is None:
                self.abort(event.id)

    def _result(self, active: Active, reason: FinishReason, error: str | None) -> RequestResult:
        """Give back all that the request holds, and say how it went."""
        now = time.perf_counter()
        held, request = active.held, active.request
        report = (
            held.report if held else CacheReport(self.residency.policy(request), "not_admitted")
        )
        if held:
            self.residency.release(held)
            active.held = None
        self.counters[f"finished_{reason}"] += 1
        return RequestResult(
            id=request.id,
            tokens=active.generated,
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            cached_tokens=report.hit_depth,
            report=report,
            ttft=(active.first_token or now) - active.submitted,
            latency=now - active.submitted,
            logprobs=tuple(active.logprobs) if request.sampling.logprobs is not None else None,
            error=error,
            prompt_logprobs=active.prompt_scores(),
        )
