"""Prometheus metrics of one server: what its requests saw, and what the engine says of itself.

Names: `dasc_request_*` are counted here, one request at a time; every other `dasc_<key>` is a gauge
read from `engine.stats()` when Prometheus asks.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from dasc_jax.engine.request import RequestResult

FIRST_TOKEN = tuple(0.005 * 2**power for power in range(14))
BETWEEN_TOKENS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
WHOLE_REQUEST = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

TOKENS = {
    "prompt": "Prompt tokens of finished requests.",
    "cached": "Prompt tokens taken from the prefix cache.",
    "replayed": "Cached tokens computed again to refresh local units.",
    "generated": "Tokens the engine generated.",
}


class EngineStats(Collector):
    """Every number of `stats()` as a gauge `dasc_<key>`, and `dasc_engine_up`.

    Args:
        stats: the engine's statistics.
        alive: whether its thread runs; `stats` is asked only then.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]], alive: Callable[[], bool]) -> None:
        self._stats, self._alive = stats, alive

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One gauge a key; after the engine's end only `dasc_engine_up`, at 0."""
        up, stats = self._alive(), {}
        try:
            stats = self._stats() if up else {}
        except RuntimeError:  # it ended since
            up = False
        yield GaugeMetricFamily("dasc_engine_up", "1 while the engine's thread runs.", value=up)
        for key, value in stats.items():
            name = "dasc_" + re.sub(r"\W", "_", key, flags=re.ASCII)
            yield GaugeMetricFamily(name, f"{key.replace('_', ' ')} (of the engine).", value=value)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, engine_stats: EngineStats) -> None:
        registry = self.registry = CollectorRegistry()
        registry.register(engine_stats)
        self._finished = Counter(
            "dasc_request_finished", "Requests by finish reason.", ["reason"], registry=registry
        )
        self._refused = Counter(
            "dasc_request_refused", "Calls refused, by HTTP status.", ["status"], registry=registry
        )
        self._lookups = Counter(
            "dasc_request_lookups",
            "Prefix cache lookups: hits, and misses by their reason.",
            ["reason", "policy"],
            registry=registry,
        )
        self._tokens = {
            kind: Counter(f"dasc_request_{kind}_tokens", text, registry=registry)
            for kind, text in TOKENS.items()
        }
        self._ttft = Histogram(
            "dasc_request_time_to_first_token_seconds",
            "From submission to the first token.",
            registry=registry,
            buckets=FIRST_TOKEN,
        )
        self._between = Histogram(
            "dasc_request_inter_token_seconds",
            "Between successive tokens of a request.",
            registry=registry,
            buckets=BETWEEN_TOKENS,
        )
        self._latency = Histogram(
            "dasc_request_seconds",
            "From submission to the last token.",
            registry=registry,
            buckets=WHOLE_REQUEST,
        )

    def refused(self, status: int) -> None:
        """Count a call that was answered with an error."""
        self._refused.labels(str(status)).inc()

    def between_tokens(self, seconds: float) -> None:
        """Observe the time between two tokens of a request."""
        self._between.observe(seconds)

    def finished(self, result: RequestResult, reason: str) -> None:
        """Count a request that has ended, `reason` as the client sees it."""
        self._finished.labels(reason).inc()
        self._lookups.labels(result.report.reason, result.report.policy).inc()
        self._tokens["prompt"].inc(result.prompt_tokens)
        self._tokens["cached"].inc(result.cached_tokens)
        self._tokens["replayed"].inc(result.report.replayed_tokens)
        self._tokens["generated"].inc(len(result.tokens))
        if result.tokens and math.isfinite(result.ttft):
            self._ttft.observe(result.ttft)
        self._latency.observe(result.latency)

    def expose(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that the `Accept` header asks for."""
        encoder, content_type = choose_encoder(accept or "")
        return encoder(self.registry), content_type
