"""Questions about invented people and towns: what the QA tasks ask where no data set is given.

A single-hop question needs one document, a two-hop question the document of a person and that of a
town. Every answer is an invented name from the split's pool.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from dasc_jax.evals.pools import Pools, distinct, distinct_choices


@dataclass(frozen=True)
class Question:
    """A question and what its prompt is made of."""

    text: str
    references: tuple[str, ...]
    """Right answers; one of them is enough."""
    documents: tuple[str, ...]
    """What has to be read to answer."""
    distractors: Iterator[tuple[str, ...]]
    """Other documents, each in parts (sentences) after any of which it may end."""


@dataclass(frozen=True)
class Relation:
    """How a fact is told, and how it is asked for."""

    statement: str
    question: str


PERSON = (
    Relation("{subject} was born in {value}.", "In which town was {subject} born?"),
    Relation("{subject} later moved to {value}.", "To which town did {subject} later move?"),
    Relation("{subject} was taught by {value}.", "Who taught {subject}?"),
)
TOWN = (
    Relation("{subject} lies on the river {value}.", "On which river does {subject} lie?"),
    Relation("{subject} is in the region of {value}.", "In which region is {subject}?"),
    Relation("{subject} was founded by {value}.", "Who founded {subject}?"),
)
BRIDGES = ("the town where {subject} was born", "the town to which {subject} later moved")
"""The towns of a person as a two-hop question names them, in the order of PERSON."""


@dataclass(frozen=True)
class Entity:
    """A person or a town with the values of its relations."""

    name: str
    relations: tuple[Relation, ...]
    values: tuple[str, ...]

    def sentences(self) -> tuple[str, ...]:
        facts = zip(self.relations, self.values, strict=True)
        return tuple(fact.statement.format(subject=self.name, value=value) for fact, value in facts)


class InventedWorld:
    """Draws people and towns; no place appears twice, and no full name of a person."""

    def __init__(self, pools: Pools, rng: Random):
        self._rng = rng
        self._places = distinct_choices(pools.names, rng)
        self._people = distinct(lambda: f"{rng.choice(pools.names)} {rng.choice(pools.names)}")

    def single_hop(self) -> Question:
        """One fact of a person or of a town."""
        kind = self._rng.choice((self._person, self._town))
        entity = kind()
        fact = self._rng.randrange(len(entity.relations))
        return Question(
            entity.relations[fact].question.format(subject=entity.name),
            (entity.values[fact],),
            (" ".join(entity.sentences()),),
            self._distractors(titled=False),
        )

    def two_hops(self) -> Question:
        """A fact of a town that is named only as the one where a person was born or moved to."""
        person = self._person()
        hop = self._rng.randrange(len(BRIDGES))
        towns = [self._town(name) for name in person.values[: len(BRIDGES)]]
        town = towns.pop(hop)
        fact = self._rng.randrange(len(TOWN))
        bridge = BRIDGES[hop].format(subject=person.name)
        return Question(
            TOWN[fact].question.format(subject=bridge),
            (town.values[fact],),
            tuple(" ".join(_titled(entity)) for entity in (person, town)),
            self._distractors(titled=True, first=towns),
        )

    def _distractors(self, titled: bool, first: Sequence[Entity] = ()) -> Iterator[tuple[str, ...]]:
        for entity in itertools.chain(first, self._people_and_their_towns()):
            yield _titled(entity) if titled else entity.sentences()

    def _people_and_their_towns(self) -> Iterator[Entity]:
        while True:
            person = self._person()
            yield person
            yield self._town(person.values[0])

    def _person(self) -> Entity:
        values = (self._place(), self._place(), next(self._people))
        return Entity(next(self._people), PERSON, values)

    def _town(self, name: str | None = None) -> Entity:
        values = (self._place(), self._place(), next(self._people))
        return Entity(name or self._place(), TOWN, values)

    def _place(self) -> str:
        if (name := next(self._places, None)) is None:
            raise ValueError("more places are needed than there are names for")
        return name


def _titled(entity: Entity) -> tuple[str, ...]:
    first, *others = entity.sentences()
    return (f"{entity.name}\n{first}", *others)
