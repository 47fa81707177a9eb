"""Several conversations under one system prompt, as token ids: the workload of the demo."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WORDS = (
    "state decay prefix page slot layer channel head token cache window horizon unit checkpoint"
    " budget request turn answer question memory key value gate router expert norm logit seed"
    " remembers forgets stores loads keeps drops merges replays resumes evicts shares measures"
    " slowly quickly exactly again never always before after every other first last and or of"
).split()


@dataclass(frozen=True)
class Workload:
    """How many conversations, how many turns each, and about how many tokens in every part."""

    conversations: int
    turns: int
    system_tokens: int
    user_tokens: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "system_tokens", "user_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def order(self) -> Iterator[tuple[int, int]]:
        """(conversation, turn) as requests arrive: round robin, so that a conversation comes back
        only after every other one has run."""
        for turn in range(self.turns):
            for conversation in range(self.conversations):
                yield conversation, turn


class Conversations:
    """The prompts of a workload, growing by replies: each holds all that went before it."""

    def __init__(self, workload: Workload, tokenizer: Any) -> None:
        self._tokenizer, self._workload = tokenizer, workload
        self._random = random.Random(workload.seed)
        system = self._encode(f"<|im_start|>system\n{self._text(workload.system_tokens)}<|im_end|>")
        self._history = [list(system) for _ in range(workload.conversations)]

    def ask(self, conversation: int) -> tuple[int, ...]:
        """The prompt of the next turn: the history, a new question, and where the answer begins."""
        question = self._text(self._workload.user_tokens)
        asked = f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        self._history[conversation] += self._encode(asked)
        return tuple(self._history[conversation])

    def answer(self, conversation: int, reply: Sequence[int]) -> None:
        """Put a reply, as token ids, behind the question."""
        self._history[conversation] += [*reply, *self._encode("<|im_end|>")]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def _text(self, tokens: int) -> str:
        """Words of at least so many tokens."""
        text = self._random.choice(WORDS).capitalize()
        while len(self._encode(text)) < tokens:
            text += " " + self._random.choice(WORDS)
        return text + "."
