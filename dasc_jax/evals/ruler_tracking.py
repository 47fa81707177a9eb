"""RULER's variable tracking: one chain of assignments hidden in noise (Hsieh et al. 2024)."""

from itertools import islice
from random import Random

from dasc_jax.evals.haystack import NOISE, Draft
from dasc_jax.evals.pools import distinct

HOPS = 4
EXAMPLE_TOKENS = 500
"""Tokens of the worked example that comes first; half the instance where that is less."""

PARAGRAPH = " ".join(NOISE)


def build_tracking(draft: Draft) -> tuple[str, tuple[str, ...]]:
    """Prompt and references (the five variables, in the chain's order) of one instance."""
    unit = draft.counter.piece(f" {PARAGRAPH}\n")
    names, value = _chain(draft, letters=3)
    shortest = draft.counter(f"{_prompt(draft.rng, names, value, 1)} {' '.join(names)}\n\n")
    spare = min(EXAMPLE_TOKENS, draft.length // 2) - shortest
    shown = _prompt(draft.rng, names, value, 1 + max(0, spare // unit))
    example = f"{shown} {' '.join(names)}\n\n"
    asked, asked_value = _chain(draft, letters=5)

    def build(paragraphs: int) -> str:
        return example + _prompt(draft.rng, asked, asked_value, paragraphs)

    fixed = draft.counter(build(1)) - unit
    most = max(1, draft.limit // unit)
    return draft.fill(build, lambda count: fixed + count * unit, most, least=1), tuple(asked)


def _chain(draft: Draft, letters: int) -> tuple[list[str], str]:
    names = distinct(lambda: draft.pools.variable(draft.rng, letters))
    return list(islice(names, HOPS + 1)), draft.pools.variable_value(draft.rng)


def _prompt(rng: Random, names: list[str], value: str, paragraphs: int) -> str:
    return (
        "Memorize and track the chain(s) of variable assignment hidden in the following text."
        f"\n\n{_context(rng, names, value, paragraphs)}\nQuestion: Find all variables that are "
        f"assigned the value {value} in the text above. Answer: According to the chain(s) of "
        f"variable assignment in the text above, {len(names)} variables are assgined the value "
        f"{value}, they are:"
    )


def _context(rng: Random, names: list[str], value: str, paragraphs: int) -> str:
    """The assignments, in order, between paragraphs of noise; between sentences if those are few.

    Raises ValueError where there is less noise than the chain has assignments.
    """
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in zip(names, names[1:], strict=False)]
    few = paragraphs <= len(chain)
    noise = [*NOISE[:-1], f"{NOISE[-1]}\n"] * paragraphs if few else [f"{PARAGRAPH}\n"] * paragraphs
    places = sorted(rng.sample(range(len(noise)), len(chain)))
    for shift, (place, assignment) in enumerate(zip(places, chain, strict=True)):
        noise.insert(place + shift, assignment)
    return " ".join(noise)
