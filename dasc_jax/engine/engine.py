"""The engine other threads talk to: it owns the loop, and alone steps it.

engine = Engine(model, EngineConfig(max_running=8))
results = engine.generate([Request("a", prompt)])            # the loop runs in the caller
engine.start(); engine.submit(request, on_event); ...        # or in a thread of its own
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dasc_jax.config import DascConfig
from dasc_jax.engine.active import Active
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.lockstep import LeadingLoop
from dasc_jax.engine.loop import Loop
from dasc_jax.engine.peers import Followers
from dasc_jax.engine.request import (
    OnEvent,
    Request,
    RequestResult,
    SamplingParams,
    TokenEvent,
    check_request,
)
from dasc_jax.engine.residency import Kept
from dasc_jax.model import Model
from dasc_jax.plan import SelectionPlan

log = logging.getLogger(__name__)

HANGING_SECONDS = 3.0
"""How long a failed engine is waited for: where another process is gone, a step may never end."""


class Engine:
    """Serves requests on one model; every method may be called from any thread.

    `on_event` may call all of them but `generate` and `start`. What it raises is logged and ends
    its own request, as an abort does; the others go on. A step that fails ends every request with
    reason "error" and the engine with them: `alive` is false from then on.

    Args:
        model: weights, config and tokenizer.
        config: sizes and policies.
        progress: called with (compiled, total) while the steps compile.
        followers: other processes that do what this one does, see `dasc_jax.engine.lockstep`.

    Raises:
        ConfigError, ValueError: sizes that do not fit together, before anything is allocated.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
        followers: Followers | None = None,
    ):
        self.config = config or EngineConfig()
        if followers is None:
            self.loop = Loop(model, self.config, progress)
        else:
            self.loop = LeadingLoop(model, self.config, progress, followers)
        self.model = self.loop.model
        self.failure: BaseException | None = None
        self._inbox: queue.Queue[Callable[[], object]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._gate = threading.Lock()  # nothing enters the inbox behind the loop's last look at it
        self._turn = threading.RLock()  # whose turn it is to step the loop, without a thread
        self._stepper: int | None = None

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request.

        `on_event` is called from the loop's thread for every token, and must not block.

        Raises:
            ValueError: the request can never run, see `check_request`.
            RuntimeError: the engine has stopped.
        """
        check_request(request, self.config, self.model.config.vocab_size)
        active = Active(request, on_event, time.perf_counter(), list(request.prompt))
        with self._gate:
            if self._stopping.is_set():
                raise RuntimeError("the engine has stopped") from self.failure
            self._inbox.put(lambda: self.loop.receive(active))

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; one that has ended already is left alone."""
        self._inbox.put(lambda: self.loop.abort(request_id))

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False, with nothing done, while requests run or wait."""
        return self._ask(self.loop.flush)

    def stats(self) -> dict[str, float]:
        """Counters and gauges: requests, tokens, pool accounting, compilations after warm-up."""
        return self._ask(self.loop.stats)

    def keep(self) -> Kept:
        """What is cached now, to come back to with `adopt`; ValueError unless idle and exact."""
        return self._ask(self.loop.keep)

    def adopt(self, kept: Kept | None, dasc: DascConfig, plan: SelectionPlan | None = None) -> None:
        """Cache as `dasc` and `plan` (None: its own) say, from what was kept last, repacked, on.

        With None nothing is cached. ValueError: requests run, the plan does not fit, or a kept page
        was evicted since. Any other error leaves what was kept last, or all if nothing is kept.
        """
        self._ask(lambda: self.loop.adopt(kept, dasc, plan))
        self.config = self.loop.config

    def start(self) -> "Engine":
        """Run the loop in a thread of its own.

        Raises:
            RuntimeError: the engine has stopped, or `on_event` asks.
        """
        self._require_outside("start")
        with self._turn, self._gate:
            if self._stopping.is_set():
                raise RuntimeError("the engine has stopped") from self.failure
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="dasc-engine", daemon=True)
                self._thread.start()
        return self

    def stop(self) -> None:
        """Abort everything and end the thread; the engine takes no request afterwards."""
        with self._gate:
            self._stopping.set()
        if self._stepper == threading.get_ident():
            return  # asked by on_event: the loop ends behind this step
        if self._thread is not None:
            self._inbox.put(lambda: None)
            if not self._joined(self._thread):
                return
        with self._turn:
            self._finish()

    def fail(self, error: Exception) -> None:
        """End the engine for a reason outside of its loop, which may hang in a step.

        `alive` is false at once. Requests end behind the step; if it never returns, they do not.
        """
        with self._gate:
            self.failure = self.failure or error
            self._stopping.set()
        self._inbox.put(lambda: None)

    @property
    def alive(self) -> bool:
        """The loop's thread runs and has not failed."""
        return self._thread is not None and self._thread.is_alive() and self.failure is None

    def generate(
        self,
        prompts: Sequence[Request | Sequence[int]],
        sampling: SamplingParams | None = None,
    ) -> list[RequestResult]:
        """Run requests to their end and return their results in order.

        A prompt may be a bare sequence of token ids; it is then sampled as `sampling` says (None:
        the defaults of `SamplingParams`) and named "prompt-" and its place.

        Raises:
            ValueError: as `submit`, or two requests of one id; nothing is run then.
            RuntimeError: the engine has stopped or fails, or `on_event` asks.
        """
        self._require_outside("generate")
        requests = [
            prompt
            if isinstance(prompt, Request)
            else Request(f"prompt-{at}", tuple(prompt), sampling or SamplingParams())
            for at, prompt in enumerate(prompts)
        ]
        for request in requests:
            check_request(request, self.config, self.model.config.vocab_size)
        twice = [key for key, count in Counter(r.id for r in requests).items() if count > 1]
        if twice:
            raise ValueError(f"request ids {twice} occur more than once")
        results: dict[str, RequestResult] = {}
        arrived = threading.Event()

        def collect(event: TokenEvent) -> None:
            if event.result is not None:
                results[event.id] = event.result
                arrived.set()

        try:
            for request in requests:
                self.submit(request, collect)
            while len(results) < len(requests):
                if self._thread is None:
                    self._step_here()
                else:
                    arrived.wait(1.0)
                    arrived.clear()
                if self.failure:
                    raise RuntimeError("the engine has failed") from self.failure
        finally:
            for request in requests:
                if request.id not in results:
                    self.abort(request.id)
        return [results[request.id] for request in requests]

    def _joined(self, thread: threading.Thread) -> bool:
        """Wait for the loop's thread; False where the engine has failed and it hangs in a step."""
        while self.failure is None and thread.is_alive():
            thread.join(0.2)
        thread.join(HANGING_SECONDS)
        return not thread.is_alive()

    def _require_outside(self, what: str) -> None:
        if self._stepper == threading.get_ident():
            raise RuntimeError(f"{what} was called inside on_event")

    def _serve(self) -> None:
        self._stepper = threading.get_ident()
        try:
            while not self._stopping.is_set():
                self._drain()
                if not self.loop.step():
                    self._inbox.get()()
            self._finish()
        except Exception as error:
            self._fail(error)
        finally:
            self._stepper = None

    def _step_here(self) -> None:
        """One step in the calling thread, for an engine without a thread of its own."""
        with self._turn:
            if self._thread is not None:
                return
            self._stepper = threading.get_ident()
            try:
                self._drain()
                self.loop.step()
                if self._stopping.is_set():
                    self._finish()
            except Exception as error:
                self._fail(error)
            finally:
                self._stepper = None

    def _fail(self, error: Exception) -> None:
        log.error("the engine's loop failed", exc_info=error)
        with self._gate:
            self.failure = self.failure or error
            self._stopping.set()
        self._finish()

    def _finish(self) -> None:
        """End every request, those in the inbox included. Legal once nothing more can enter it."""
        self._drain()
        if self.failure is None:
            self.loop.abort_all("abort")
        else:
            reason = f"the engine failed: {type(self.failure).__name__}: {self.failure}"
            self.loop.abort_all("error", reason)

    def _drain(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            message()

    def _ask[T](self, question: Callable[[], T]) -> T:
        """Ask the loop between two steps (or, from `on_event`, inside one) for an answer."""
        if self._stepper == threading.get_ident():
            return question()
        with self._turn:
            ended = self._thread is None or not self._thread.is_alive()
            if ended and self.failure is None:
                self._drain()
                return question()
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(reply)
        while self.alive:
            try:
                return answer.result(timeout=0.2)
            except TimeoutError:
                continue
        raise RuntimeError("the engine has stopped") from self.failure
