"""Table 1a of the paper: which half of a cached prefix a single-needle question is answered from.

The prefix is prefilled once up to a multiple of 64 tokens. Each intervention starts from that same
cache, clears the attention KV, the recurrent state, both or neither, and answers the question.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32
from matplotlib.figure import Figure
from rich.table import Table

from dasc_jax.analysis.chart import INK, blank, style, text_table
from dasc_jax.evals.ruler import Generator, score
from dasc_jax.evals.stats import mean_interval
from dasc_jax.model import Cache, Model, forward, init_recurrent
from dasc_jax.models import State, init_pages
from dasc_jax.tokenizer import Tokenizer
from dasc_jax.types import PAGE

TASK = "niah_single_1"

SLICE = 256
"""Tokens of every sequence that one prefill takes: bounds its logits, and compiles one shape."""


class Intervention(NamedTuple):
    """What is set to zero before a cached prefix is reused."""

    name: str
    pages: bool
    recurrent: bool


INTERVENTIONS = (
    Intervention("baseline", False, False),
    Intervention("zero-full-kv", True, False),
    Intervention("zero-linear", False, True),
    Intervention("zero-both", True, True),
)


@dataclass(frozen=True)
class Probe:
    """A prompt in two parts: what is cached, a multiple of 64 tokens, and what follows."""

    depth: float
    index: int
    prefix: tuple[int, ...]
    rest: tuple[int, ...]
    references: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    """What a probe was answered under an intervention, and its score in [0, 1]."""

    intervention: str
    depth: float
    index: int
    cached_tokens: int
    prompt_tokens: int
    score: float
    text: str
    reference: str


@dataclass(frozen=True)
class Accuracy:
    """A cell of Table 1a: the mean score of `n` probes, with the bootstrap's 95% interval.

    `depth` "all" pools the depths.
    """

    intervention: str
    depth: str
    n: int
    accuracy: float
    low: float
    high: float


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer; ValueError where it has none."""
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: Table 1 takes text to run over")
    return model.tokenizer


def make_probe(
    tokenizer: Tokenizer,
    generator: Generator,
    length: int,
    depth: float,
    index: int,
    new_tokens: int,
) -> Probe:
    """Instance `index` of NIAH-S1 with its needle at `depth`, cut before the question.

    The cut is the last multiple of 64 tokens before the question, the prompt's last line.

    Raises:
        ValueError: no multiple of 64 behind the needle: the question could be answered from what is
            not cached.
    """
    made = generator.instance(TASK, length, index, depth=depth)
    encode = tokenizer.encode
    context = made.prompt.rsplit("\n", 1)[0]
    ids = tuple(encode(made.prompt))
    cut = min(len(encode(context)), len(ids) - 1) // PAGE * PAGE
    cached = tokenizer.decode(ids[:cut])
    if not all(reference in cached for reference in made.references):
        raise ValueError(
            f"the needle at depth {depth:g} of {len(ids)} tokens is not within the {cut} that are"
            f" cached; choose a longer prompt or a smaller depth"
        )
    limit = min(made.max_new_tokens, new_tokens)
    return Probe(depth, index, ids[:cut], ids[cut:], tuple(made.references), limit)


def run(model: Model, probes: Sequence[Probe], batch: int) -> Iterator[list[Answer]]:
    """Answer every probe under every intervention, `batch` sequences at a time, greedily.

    Yields the answers of a batch under one intervention. The last batch may be filled up with
    repetitions, which are not counted.
    """
    most = max(len(p.prefix) + len(p.rest) + p.max_new_tokens for p in probes)
    width = -(-max(len(p.rest) for p in probes) // PAGE) * PAGE
    for first in range(0, len(probes), batch):
        real = list(probes[first : first + batch])
        filled = real + real[-1:] * (min(batch, len(probes)) - len(real))
        cache = prefilled(model, [p.prefix for p in filled], most)
        for chosen in INTERVENTIONS:
            start = intervened(cache, chosen)
            limits = [p.max_new_tokens for p in filled]
            tokens = continued(model, start, [p.rest for p in filled], limits, width)
            yield [_answer(model, chosen, p, t) for p, t in zip(real, tokens, strict=False)]


def prefilled(model: Model, prefixes: Sequence[Sequence[int]], room: int) -> Cache:
    """A cache of all prefixes, with pages for `room` tokens each, filled SLICE tokens at a time."""
    rows, pages = len(prefixes), -(-room // PAGE)
    state = State(
        init_recurrent(model.config, rows + 1, model.dtype, model.mesh),
        init_pages(model.config, rows * pages + 1, jnp.dtype(model.dtype), model.mesh),
    )
    cache = Cache(state, np.zeros(rows, np.int64))
    lengths = np.array([len(p) for p in prefixes])
    padded = _padded(prefixes, -(-int(lengths.max()) // SLICE) * SLICE)
    for start in range(0, padded.shape[1], SLICE):
        take = np.clip(lengths - start, 0, SLICE)
        _, cache = forward(model, padded[:, start : start + SLICE], cache, take)
    return cache


def intervened(cache: Cache, chosen: Intervention) -> Cache:
    """The same cache with attention KV, recurrent states (convolution windows too) or both zero."""
    recurrent, pages = cache.state
    if chosen.pages:
        pages = jax.tree.map(jnp.zeros_like, pages)
    if chosen.recurrent:
        recurrent = jax.tree.map(jnp.zeros_like, recurrent)
    return replace(cache, state=State(recurrent, pages))


def continued(
    model: Model,
    cache: Cache,
    rests: Sequence[Sequence[int]],
    limits: Sequence[int],
    width: int,
) -> list[list[int]]:
    """Greedy tokens of every sequence: up to its limit, and up to and without an end token.

    `rests` are what follows the cached tokens, padded to `width`.
    """
    lengths = np.array([len(r) for r in rests])
    logits, cache = forward(model, _padded(rests, width), cache, lengths)
    chosen = np.asarray(_greedy(logits, lengths - 1))
    ends = np.array(model.config.eos_token_ids, np.int64)
    out: list[list[int]] = [[] for _ in rests]
    live = np.ones(len(rests), bool)
    while True:
        live &= ~np.isin(chosen, ends)
        for row in np.flatnonzero(live):
            out[row].append(int(chosen[row]))
        live &= np.array([len(o) < limit for o, limit in zip(out, limits, strict=True)])
        if not live.any():
            return out
        logits, cache = forward(model, chosen[:, None], cache)
        chosen = np.asarray(_greedy(logits, np.zeros_like(lengths)))


@jax.jit
def _greedy(logits: Float32[Array, "B T vocab"], at: Any) -> Array:
    return jnp.argmax(logits[jnp.arange(logits.shape[0]), at], axis=-1)


def accuracies(answers: Sequence[Answer]) -> list[Accuracy]:
    """Mean scores by intervention: all depths together, then each."""
    depths = sorted({a.depth for a in answers})
    result = []
    for name in (i.name for i in INTERVENTIONS):
        mine = [a for a in answers if a.intervention == name]
        for depth in (None, *depths):
            scores = [a.score for a in mine if depth in (None, a.depth)]
            mean, low, high, n = mean_interval(np.array(scores))
            label = "all" if depth is None else f"{depth:g}"
            result.append(Accuracy(name, label, n, mean, low, high))
    return result


def table(cells: Sequence[Accuracy], title: str) -> Table:
    """Table 1a as a rich table, with the interval of the mean over all depths."""
    depths = dict.fromkeys(c.depth for c in cells if c.depth != "all")
    result = text_table(
        f"Table 1a, {title}: accuracy on NIAH-S1, n = {cells[0].n} ({cells[1].n} a depth)",
        ["intervention", "all depths", "95% interval", *(f"at {depth}" for depth in depths)],
    )
    for chosen in INTERVENTIONS:
        pooled, *others = [c for c in cells if c.intervention == chosen.name]
        result.add_row(
            chosen.name,
            f"{pooled.accuracy:.3f}",
            rf"\[{pooled.low:.3f}, {pooled.high:.3f}]",
            *(f"{c.accuracy:.3f}" for c in others),
        )
    return result


def draw(rows: Sequence[Accuracy], title: str) -> Figure:
    """Table 1a as a picture: a cell for every intervention and depth."""
    names = [i.name for i in INTERVENTIONS]
    depths = list(dict.fromkeys(r.depth for r in rows))
    values = np.array([r.accuracy for r in rows]).reshape(len(names), len(depths))
    figure = blank(6.8, 3.2)
    axes = figure.subplots()
    axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, f"{value:.3f}", ha="center", va="center", fontsize=9,
                  color="white" if value < 0.6 else INK)  # fmt: skip
    style(axes, f"Table 1a, {title}: accuracy on NIAH-S1", "depth of the needle", "", grid=False)
    axes.set_xticks(range(len(depths)), depths)
    axes.set_yticks(range(len(names)), names)
    return figure


def _answer(model: Model, chosen: Intervention, probe: Probe, tokens: list[int]) -> Answer:
    text = tokenizer_of(model).decode(tokens)
    return Answer(
        intervention=chosen.name,
        depth=probe.depth,
        index=probe.index,
        cached_tokens=len(probe.prefix),
        prompt_tokens=len(probe.prefix) + len(probe.rest),
        score=score(TASK, probe.references, text),
        text=text,
        reference=" ".join(probe.references),
    )


def _padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    result = np.zeros((len(rows), width), np.int32)
    for row, tokens in zip(result, rows, strict=True):
        row[: len(tokens)] = tokens
    return result
