"""What requests hold while they run: a slot, pages, a lock on their prefix, checkpoints on the way.

The one place where the pure prefix cache meets an engine. Everything taken here is given back by
`release`, however a request ends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dasc_jax import prefix_cache
from dasc_jax.checkpoint_state import (
    CheckpointMeta,
    CheckpointPool,
    Policy,
    replay_span,
    units,
    verify,
)
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.request import CacheReport, Request
from dasc_jax.engine.scheduler import checkpoint_depths
from dasc_jax.plan import SelectionPlan
from dasc_jax.prefix_cache import Lock, Match, PrefixCache, page_keys
from dasc_jax.types import PAGE


@dataclass
class Holding:
    """Everything one admitted request holds.

    `pages` cover all its positions in order; of them `private` are its own and not in the trie.
    `pending` maps a depth to the checkpoint slot a dispatched prefill step fills, `skipped` are
    depths no slot could be had for. `lineage` is that of the state it runs from.
    """

    slot: int
    pages: tuple[int, ...]
    private: set[int]
    lock: Lock
    report: CacheReport
    load_slot: int
    replay: int
    checkpoints: tuple[int, ...]
    lineage: int
    pending: dict[int, int] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Kept:
    """What an idle engine had cached: the trie, and dense float32 checkpoints of its states.

    Its pages stay with the engine. It can be adopted until one of them is evicted.
    """

    cache: PrefixCache
    meta: dict[int, CheckpointMeta]
    plan: SelectionPlan
    pool: CheckpointPool


class Residency:
    """The host state of all pools of an engine. Not thread safe: the engine's loop owns it."""

    def __init__(self, config: EngineConfig, plan: SelectionPlan, checkpoint_slots: int):
        self.config, self.plan = config, plan
        self.checkpoint_slots = checkpoint_slots
        self.cache: PrefixCache = prefix_cache.empty(config.num_pages, checkpoint_slots + 1)
        self.free_slots = tuple(range(1, config.max_running + 1))
        self.meta: dict[int, CheckpointMeta] = {}
        self.counters: Counter[str] = Counter()
        self.lossy = not plan.exact or config.dasc.quantization is not None
        self.kept: Kept | None = None  # None once a page it names may have been written anew

    def policy(self, request: Request) -> Policy:
        """The load policy of a request: its own, else the engine's."""
        return request.state_policy or self.config.dasc.policy

    def admit(self, request: Request, tokens: np.ndarray) -> Holding | None:
        """Take a slot, a lock and pages for the whole request; None, and nothing, if they lack."""
        if not self.free_slots:
            return None
        policy = self.policy(request)
        cache, found = self._match(self.cache, request, tokens, policy)
        cache, held = prefix_cache.lock(cache, found)
        need = -(-(len(tokens) + request.sampling.max_tokens) // PAGE) - len(found.pages)
        cache, pages, evicted = prefix_cache.allocate_pages(cache, need)
        if pages is None:
            return None
        self.cache = cache
        self._forget(evicted.slots)
        if evicted.pages:
            self.kept = None
        self.counters["evicted_pages"] += len(evicted.pages)
        self.counters["evicted_checkpoints"] += len(evicted.slots)
        slot, *rest = self.free_slots
        self.free_slots = tuple(rest)
        return self._holding(request, tokens, found, held, pages, slot, policy)

    def _match(
        self, cache: PrefixCache, request: Request, tokens: np.ndarray, policy: Policy
    ) -> tuple[PrefixCache, Match]:
        if not self.config.prefix_cache or request.sampling.prompt_logprobs is not None:
            return cache, Match("no_kv", 0, 0, 0, 0, 0, (), None)
        room = self.config.max_lineage
        cache, found = prefix_cache.match(
            cache,
            tokens,
            plan_id=None if policy == "dense" and self.lossy else self.plan.id,
            # The load itself adds one lossy step to whatever lies behind the state.
            max_lineage=room - 1 if room is not None and self.lossy else room,
            namespace=request.namespace,
        )
        if found.depth:
            fault = self._fault(found)
            if fault:
                self.counters[f"integrity_{fault}"] += 1
                found = found._replace(
                    reason=fault, depth=0, branch_depth=0, slot=0, lineage=0, pages=(), key=None
                )
        return cache, found

    def _fault(self, found: Match) -> str | None:
        """Why the checkpoint in `found.slot` is not what the trie says it is; None when it is."""
        meta = self.meta.get(found.slot)
        if meta is None or found.key is None:
            return "no_checkpoint"
        return verify(meta, depth=found.depth, token_hash=found.key, plan_id=self.plan.id)

    def _holding(
        self,
        request: Request,
        tokens: np.ndarray,
        found: Match,
        held: Lock,
        pages: tuple[int, ...],
        slot: int,
        policy: Policy,
    ) -> Holding:
        hit, scored = found.depth > 0, request.sampling.prompt_logprobs
        exact_policy: Policy = "dense" if self.plan.exact else policy
        loaded, zeroed, refreshed = units(self.plan, exact_policy) if hit else (0, 0, 0)
        start, replayed, _ = replay_span(self.plan, found.depth, exact_policy if hit else "nr")
        lineage = found.lineage + (1 if hit and self.lossy else 0)
        report = CacheReport(
            policy=policy,
            reason=found.reason if scored is None else "prompt_logprobs",
            hit_depth=found.depth,
            kv_depth=found.kv_depth,
            lineage=lineage,
            units_loaded=loaded,
            units_zeroed=zeroed,
            units_refreshed=refreshed,
            replayed_tokens=replayed,
        )
        interval = self.config.checkpoint_interval
        depths = checkpoint_depths(len(tokens), found.depth, found.branch_depth, interval)
        return Holding(
            slot=slot,
            pages=(*found.pages, *pages),
            private=set(pages),
            lock=held,
            report=report,
            load_slot=found.slot,
            replay=found.depth - start,
            checkpoints=depths if self.config.prefix_cache else (),
            lineage=lineage,
        )

    def loaded(self, held: Holding) -> None:
        """Let the checkpoint go: its reader is dispatched, and the device keeps the order."""
        self.cache, held.lock = prefix_cache.unlock_state(self.cache, held.lock)

    def checkpoint_slot(self, held: Holding, depth: int) -> int:
        """A pool slot for the state at `depth`; 0, the sink, when none can be had (counted)."""
        full = not self.cache.counts.free_slots
        self.cache, slot = prefix_cache.allocate_slot(self.cache)
        if slot is None:
            self.counters["checkpoints_skipped"] += 1
            held.skipped.append(depth)
            return 0
        self._forget((slot,))
        self.counters["evicted_checkpoints"] += full
        held.pending[depth] = slot
        return slot

    def publish(self, request: Request, held: Holding, tokens: Sequence[int]) -> None:
        """Give the complete pages of `tokens`, all computed, and filled checkpoints to the trie."""
        if not self.config.prefix_cache:
            return
        whole = len(tokens) // PAGE
        array = np.asarray(tokens[: whole * PAGE], np.int32)
        states = [(depth, slot, held.lineage) for depth, slot in sorted(held.pending.items())]
        self.cache, put = prefix_cache.insert(
            self.cache,
            array,
            held.pages[:whole],
            states,
            kv_lineage=held.lineage,
            plan_id=self.plan.id,
            namespace=request.namespace,
            lock=held.lock,
            skipped=held.skipped,
        )
        held.lock = put.lock or held.lock
        held.private -= set(put.adopted)
        if put.freed_pages:
            self.kept = None
        stored = [(depth, slot) for depth, slot in put.attached if held.pending.get(depth) == slot]
        held.pending.clear()
        held.skipped.clear()
        self._forget(put.freed_slots)
        keys = list(page_keys(array, request.namespace)) if stored else []
        for depth, slot in stored:
            key = keys[depth // PAGE - 1]
            self.meta[slot] = CheckpointMeta(depth, key, self.plan.id, held.lineage)
            self.counters["checkpoints_stored"] += 1

    def release(self, held: Holding) -> None:
        """Give everything back: pending slots, private pages, the lock, the recurrent slot."""
        for slot in held.pending.values():
            self.cache = prefix_cache.release_slot(self.cache, slot)
        self.cache = prefix_cache.release_pages(self.cache, sorted(held.private))
        self.cache = prefix_cache.unlock(self.cache, held.lock)
        self.free_slots = (*self.free_slots, held.slot)
        held.pending, held.private = {}, set()

    def flush(self) -> None:
        """Forget everything cached. Legal only when no request runs (else ValueError)."""
        self.cache = prefix_cache.flush(self.cache)
        self.meta, self.kept = {}, None

    def keep(self, pool: CheckpointPool) -> Kept:
        """What is cached now, to come back to with `adopt`; `pool` is a copy of the checkpoints.

        Raises:
            ValueError: requests run, or the checkpoints are not dense float32 ones.
        """
        if not self.cache.counts.idle:
            raise ValueError(f"the prefix cache is in use: {self.cache.counts}")
        if self.lossy:
            raise ValueError(
                f"checkpoints are lossy ({self.plan!r}, {self.config.dasc.quantization});"
                " keep dense float32 ones"
            )
        self.kept = Kept(self.cache, dict(self.meta), self.plan, pool)
        return self.kept

    def require_adoptable(self, kept: Kept | None) -> None:
        """Raises ValueError where requests run, or pages of `kept` were given away since."""
        if not self.cache.counts.idle:
            raise ValueError(f"the prefix cache is in use: {self.cache.counts}")
        if kept is not None and kept is not self.kept:
            raise ValueError("pages were evicted since, or others were kept: warm up again")

    def adopt(self, kept: Kept | None, config: EngineConfig, plan: SelectionPlan) -> None:
        """Go back to what was cached then (None: nothing), its checkpoints now under `plan`.

        Legal where `require_adoptable` does not raise; raises nothing itself.
        """
        self.config, self.plan = config, plan
        self.lossy = not plan.exact or config.dasc.quantization is not None
        if kept is None:
            self.flush()
            return
        self.meta = {slot: meta._replace(plan_id=plan.id) for slot, meta in kept.meta.items()}
        nodes = kept.cache.nodes
        states = {key: nodes[key].state for key in (meta.token_hash for meta in self.meta.values())}
        self.cache = replace(
            kept.cache,
            nodes=nodes.update(
                {
                    key: nodes[key]._replace(state=state._replace(plan_id=plan.id))
                    for key, state in states.items()
                }
            ),
        )

    def stats(self) -> dict[str, float]:
        """Pool accounting and counters, O(1) in the size of the pools."""
        counts = self.cache.counts._asdict()
        return {
            **{k: float(v) for k, v in counts.items()},
            **{k: float(v) for k, v in self.counters.items()},
        }

    def _forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.meta.pop(slot, None)
