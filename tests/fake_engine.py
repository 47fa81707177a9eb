"""An engine without a model, for tests of the server: the same seam, tokens from a script."""

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dasc_jax.engine.request import CacheReport, OnEvent, Request, RequestResult, TokenEvent
from dasc_jax.server import make_server

PAGE = 64
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ids 0..255 in the order of the bytes, and two special ones, 256 and 257."""
    vocab = {piece: byte for byte, piece in enumerate(_alphabet())}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _alphabet() -> list[str]:
    """The characters that byte-level tokenizers write for the bytes 0..255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


EOS = 256
Script = Callable[[Request, int], int]


def says(text: str) -> Script:
    """A script that generates the bytes of `text`, then end of text."""
    tokens = [*text.encode(), EOS]
    return lambda request, i: tokens[min(i, len(tokens) - 1)]


def counts(request: Request, i: int) -> int:
    """A script of printable tokens that depend on the prompt, the seed and the position only."""
    return 33 + (sum(request.prompt) + 7 * request.sampling.seed + i) % 90


class FakeEngine:
    """Generates a token for every running request each `step` seconds, in a thread of its own.

    Its prefix cache remembers whole pages of finished prompts, per namespace. `limit` is a length
    of prompts that no pool could hold, `fails` the token at which a request ends in an error.
    """

    def __init__(
        self,
        script: Script = counts,
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        step: float = 0.0,
        slots: int = 4,
        max_context: int = 512,
        limit: int = 400,
        fails: int | None = None,
    ) -> None:
        config = SimpleNamespace(vocab_size=258, max_context=1024, eos_token_ids=(EOS,))
        self.model = SimpleNamespace(tokenizer=tokenizer, config=config)
        self.config = SimpleNamespace(max_context=max_context)
        self.script, self.step, self.slots = script, step, slots
        self.limit, self.fails = limit, fails
        self.failure: BaseException | None = None
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.deliveries: Counter[str] = Counter()
        self._lock = threading.Condition()
        self._waiting: list[tuple[Request, OnEvent, float]] = []
        self._running: list[_Run] = []
        self._cached: set[tuple[str, tuple[int, ...]]] = set()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        with self._lock:
            if self._stop:
                raise RuntimeError("the engine has stopped")
            if len(request.prompt) > self.limit:
                raise ValueError(f"the pool holds {self.limit} tokens, not {len(request.prompt)}")
            self.requests.append(request)
            self._waiting.append((request, on_event, time.monotonic()))
            self._lock.notify()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            self._lock.notify()

    def flush_cache(self) -> bool:
        with self._lock:
            if self._waiting or self._running:
                return False
            self._cached.clear()
            return True

    def stats(self) -> dict[str, float]:
        with self._lock:
            return {
                "queue_requests": float(len(self._waiting)),
                "running_requests": float(len(self._running)),
                "slots_free": float(self.slots - len(self._running)),
                "compiles_after_warmup": 0.0,
                "odd key/ratio": math.nan,
            }

    @property
    def busy(self) -> int:
        """Requests that hold a place, waiting or running."""
        with self._lock:
            return len(self._waiting) + len(self._running)

    def stop(self) -> None:
        """End the thread as a fault would: nothing is said to the requests."""
        with self._lock:
            self._stop = True
            self._lock.notify()
        self._thread.join(5)

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._stop or self._waiting or self._running)
                if self._stop:
                    return
                events = self._tick()
            for on_event, event in events:
                self.deliveries[event.id] += 1
                on_event(event)
            time.sleep(self.step)

    def _tick(self) -> list[tuple[OnEvent, TokenEvent]]:
        events = []
        for request, on_event, since in tuple(self._waiting):
            if request.id in self.aborted or len(self._running) < self.slots:
                self._waiting.remove((request, on_event, since))
                self._running.append(_Run(request, on_event, since, self._hit(request)))
        for run in tuple(self._running):
            event = run.advance(self.script, run.request.id in self.aborted, self.fails)
            if event.result is not None:
                self._running.remove(run)
                whole = len(run.request.prompt) // PAGE * PAGE
                pages = {run.request.prompt[:end] for end in range(PAGE, whole + 1, PAGE)}
                self._cached |= {(run.request.namespace, page) for page in pages}
            events.append((run.on_event, event))
        return events

    def _hit(self, request: Request) -> int:
        ends = range(PAGE, len(request.prompt), PAGE)
        hits = [end for end in ends if (request.namespace, request.prompt[:end]) in self._cached]
        return max(hits, default=0)


class _Run:
    def __init__(self, request: Request, on_event: OnEvent, since: float, cached: int) -> None:
        self.request, self.on_event, self.since, self.cached = request, on_event, since, cached
        self.tokens: list[int] = []
        self.first = math.nan

    def advance(self, script: Script, aborted: bool, fails: int | None) -> TokenEvent:
        name, sampling = self.request.id, self.request.sampling
        if aborted:
            return TokenEvent(name, None, None, None, self._result("abort"))
        if len(self.tokens) == fails:
            return TokenEvent(name, None, None, None, self._result("error", "no luck"))
        token = script(self.request, len(self.tokens))
        self.tokens.append(token)
        if len(self.tokens) == 1:
            self.first = time.monotonic() - self.since
        ends = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        reason = "stop" if ends else "length" if len(self.tokens) == sampling.max_tokens else None
        top, logprob = None, None
        if sampling.logprobs is not None:
            logprob = -math.inf if token == EOS else -0.5
            top = {t: -0.5 - abs(t - token) for t in range(sampling.logprobs)}
        result = None if reason is None else self._result(reason)
        return TokenEvent(name, token, logprob, top, result)

    def _result(self, reason, error: str | None = None) -> RequestResult:
        report = CacheReport(
            policy=self.request.state_policy or "nr",
            reason="hit" if self.cached else "no_kv",
            hit_depth=self.cached,
            kv_depth=self.cached,
            units_loaded=3 * (self.cached > 0),
            units_zeroed=5 * (self.cached > 0),
            replayed_tokens=16 * (self.request.state_policy == "wr" and self.cached > 0),
        )
        return RequestResult(
            id=self.request.id,
            tokens=tuple(self.tokens),
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
            report=report,
            ttft=self.first,
            latency=time.monotonic() - self.since,
            error=error,
        )


@contextlib.contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """The base URL of a real server over `engine`, on a free port of this machine, in a thread."""
    server = make_server(engine, "tiny", port=0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, 10)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"
        if engine.alive:
            engine.stop()


@contextlib.contextmanager
def client(base_url: str) -> Iterator[httpx.Client]:
    """An HTTP client of a server, with a short patience."""
    with httpx.Client(base_url=base_url, timeout=20, trust_env=False) as http:
        yield http


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for a condition; the seconds it took. Fails when it does not come true in time."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"still not so after {seconds} s")
        time.sleep(0.005)
    return time.monotonic() - start
