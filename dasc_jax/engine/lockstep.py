"""Several processes that serve as one: the first decides, the others repeat it step by step.

What a loop does follows from what it was told (requests, aborts, flushes) and from the tokens it
sampled, never from the clock: times go into results only. So the first process sends what it tells
its own loop, as plain values and before it does so, and every other one tells its loop the same.
Device steps are one program of all processes, whose sampled tokens each of them can read: nothing
comes back.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields

import jax

from dasc_jax.config import DascConfig
from dasc_jax.engine.active import Active
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.loop import Loop
from dasc_jax.engine.peers import Followers, Leader
from dasc_jax.engine.request import FinishReason, TokenEvent
from dasc_jax.engine.residency import Kept
from dasc_jax.model import Model
from dasc_jax.parallel import rank_count
from dasc_jax.plan import SelectionPlan

BLAME_SECONDS = 5.0
"""How long a failed step waits to hear that a lost process was its cause."""


class DivergedError(RuntimeError):
    """A process is no longer where the first one is."""


class LeadingLoop(Loop):
    """The loop of the first process: the others do what it does.

    It takes questions that change it between steps only, and a request whose `on_event` raises
    goes before the next step: the others do not hear `on_event`.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None,
        followers: Followers,
    ):
        super().__init__(model, config, progress)
        self.followers = followers
        self._stepping = False
        self._dropped: list[tuple[str, FinishReason, str | None]] = []

    def receive(self, active: Active) -> None:
        """See `Loop.receive`."""
        self.followers.send("receive", active.request)
        super().receive(active)

    def abort(
        self, request_id: str, reason: FinishReason = "abort", error: str | None = None
    ) -> None:
        """See `Loop.abort`."""
        if self._stepping:
            self._dropped.append((request_id, reason, error))
            return
        self.followers.send("abort", request_id, reason, error)
        super().abort(request_id, reason, error)

    def flush(self) -> bool:
        """See `Loop.flush`."""
        self._require_between_steps()
        self.followers.send("flush")
        return super().flush()

    def keep(self) -> Kept:
        """See `Engine.keep`."""
        self._require_between_steps()
        self.followers.send("keep")
        return super().keep()

    def adopt(self, kept: Kept | None, dasc: DascConfig, plan: SelectionPlan | None) -> None:
        """See `Engine.adopt`. The others have kept what they had when this process did."""
        self._require_between_steps()
        if kept is None or kept is self.residency.kept:
            self.followers.send("adopt", kept is not None, dasc, plan)
        super().adopt(kept, dasc, plan)

    def step(self) -> bool:
        """See `Loop.step`.

        Raises:
            ProcessLost: the step failed, and a process is gone.
        """
        for dropped in self._dropped:
            self.abort(*dropped)
        self._dropped.clear()
        self.followers.send("step", position(self))
        self._stepping = True
        try:
            return super().step()
        except Exception as error:
            lost = self.followers.lost_within(BLAME_SECONDS)
            if lost is None:
                raise
            raise lost from error
        finally:
            self._stepping = False

    def _require_between_steps(self) -> None:
        if self._stepping:
            raise RuntimeError("several processes serve: ask outside on_event")


def follow(loop: Loop, leader: Leader) -> None:
    """Do what the first process does until it stops.

    Raises:
        DivergedError: this process is not where the first one is. Whatever a step raises.
    """
    while (message := leader.next()) != ("stop",):
        match message:
            case ("step", place):
                if place != position(loop):
                    raise DivergedError(f"process 0 is at {place}, this one at {position(loop)}")
                loop.step()
            case ("receive", request):
                loop.receive(Active(request, _unheard, 0.0, list(request.prompt)))
            case ("abort", request_id, reason, error):
                loop.abort(request_id, reason, error)
            case ("flush",):
                loop.flush()
            case ("keep",):
                with _refused():
                    loop.keep()
            case ("adopt", from_kept, dasc, plan):
                with _refused(jax.errors.JaxRuntimeError):
                    loop.adopt(loop.residency.kept if from_kept else None, dasc, plan)
            case _:
                raise ValueError(f"message {message[0]!r} of process 0 is unknown here")


def position(loop: Loop) -> tuple[int, ...]:
    """Where a loop is: tokens sampled and forms adopted so far, and what its pools hold; equal in
    all processes before every step."""
    return (loop.digest, *loop.residency.cache.counts)


def description(loop: Loop) -> Mapping[str, str]:
    """All that must be alike for loops to run in lockstep, in words."""
    return {
        "jax": jax.__version__,
        "model": f"{loop.model.config}",
        "dtype": loop.model.dtype,
        "ranks": f"{rank_count(loop.model.mesh)}",
        "plan": loop.plan.id,
    } | {field.name: f"{getattr(loop.config, field.name)}" for field in fields(loop.config)}


def _unheard(event: TokenEvent) -> None:
    """Only the first process has clients."""


def _refused(*failed: type[Exception]) -> contextlib.AbstractContextManager[None]:
    """What is refused here was refused in the first process too, and so was what has no room, an
    error of `failed` that changes nothing: if not, the digests differ before the next step."""
    return contextlib.suppress(ValueError, *failed)
