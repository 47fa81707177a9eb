"""A small byte-level BPE tokenizer whose digits stand alone, as `load_tokenizer` reads it."""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dasc_jax.evals.ruler import TASKS, Generator, expected_answer
from dasc_jax.tokenizer import BYTE_SPECIALS

END_OF_TEXT, START_OF_TURN, END_OF_TURN = range(len(BYTE_SPECIALS))
"""Ids of the specials: they come first in the vocabulary."""


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn `vocabulary` tokens (the three specials and 256 bytes among them) from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(BYTE_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class _Words:
    """Counts words: enough to size prompts before there is a tokenizer."""

    def encode(self, text: str, /) -> list[str]:
        return text.split()


def training_texts(essays: str, seed: int, prompts: int = 40) -> Iterator[str]:
    """The essays, and some prompts of every RULER task from the training pools."""
    yield from essays.split("\n")
    generator = Generator(_Words(), split="train", seed=seed, essays=essays)
    for task in TASKS:
        for index in range(prompts):
            instance = generator.instance(task, 1024, index)
            yield instance.prompt + expected_answer(instance)
