"""A byte-pair tokenizer trained on the spot: leading spaces in words, digits one by one."""

import functools
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dasc_jax.evals.haystack import NOISE
from dasc_jax.evals.pools import Pools

TEMPLATES = (
    "One of the special magic numbers for is: What are all the special magic uuids mentioned in "
    "the provided text? Memorize and track the chain(s) of variable assignment hidden in the "
    "following text. Question: Answer: According to Below is a numbered list of words. Answer the "
    "question based on the given documents. Only give me the answer and do not output any other "
    "words. Document lies on the river is in the region of was founded by was born in later moved "
    "to was taught by Read the following coded text and track the frequency of each coded word."
)


@functools.cache
def small_bpe() -> Tokenizer:
    """A vocabulary of 2,048, trained on the templates' words and a part of the training pool."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, show_progress=False, initial_alphabet=bytes_of.alphabet()
    )
    texts = [TEMPLATES, " ".join(NOISE), " ".join(Pools("train").words)]
    tokenizer.train_from_iterator([*texts[:2] * 20, texts[2]], trainer)
    return tokenizer


@functools.cache
def small_essays() -> str:
    """Sentences of 3 to 25 training words, about 30,000 words in all."""
    rng = random.Random(5)
    words = Pools("train").words
    sentences = (" ".join(rng.choices(words, k=rng.randint(3, 25))) for _ in range(2000))
    return " ".join(f"{sentence.capitalize()}." for sentence in sentences)
