"""Text out of tokens, piece by piece: no half characters, no beginnings of stop strings."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
MOST_PENDING = 3
"""Bytes that may wait for the last one of their UTF-8 character, each U+FFFD at worst."""
LONG_WINDOW = 32


class Detokenizer:
    """The text of a growing token sequence; its pieces join to the decode of all tokens at once.

    Only a window of the last tokens is decoded again for each new one. It begins at a token after
    which the text was complete, and keeps the piece before as context, for decoders that treat a
    first token specially.

    Args:
        tokenizer: has `decode(ids, skip_special_tokens=...) -> str`; None decodes everything to "".
        skip_special: whether special tokens have no text.
    """

    def __init__(self, tokenizer: Any | None, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text went out in an earlier piece
        self._emitted = 0  # characters of the window's text that are out
        self.length = 0  # characters out in all

    def push(self, token: int) -> str:
        """The characters that `token` completes, "" while one is still open."""
        if self._tokenizer is None:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        tail = len(text) - len(text.rstrip(REPLACEMENT))
        stable = len(text) - min(tail, MOST_PENDING)
        piece = self._take(text, stable)
        if piece and not tail:
            self._slide(self._context, len(self._window))
        elif len(self._window) > LONG_WINDOW:
            self._split(text)
        return piece

    def finish(self) -> str:
        """What is still held back: bytes that never became a character, as U+FFFD."""
        if not self._window:
            return ""
        text = self._decode(self._window)
        return self._take(text, len(text))

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _take(self, text: str, end: int) -> str:
        piece = text[self._emitted : end]
        self._emitted += len(piece)
        self.length += len(piece)
        return piece

    def _slide(self, start: int, context: int) -> None:
        self._window = self._window[start:]
        self._context = context - start
        self._emitted = len(self._decode(self._window[: self._context]))

    def _split(self, text: str) -> None:
        """Cut a window that invalid bytes keep open, if its halves decode as they do together."""
        half = len(self._window) // 2
        before, after = self._decode(self._window[:half]), self._decode(self._window[half:])
        if after and before + after == text and len(before) <= self._emitted:
            self._window, self._context = self._window[half:], 0
            self._emitted -= len(before)


def offsets(tokens: Sequence[int], tokenizer: Any | None) -> list[int]:
    """Where the text of each token begins in the text of them all, special ones included."""
    text, found = Detokenizer(tokenizer, skip_special=False), []
    for token in tokens:
        found.append(text.length)
        text.push(token)
    return found


class StopStrings:
    """Cuts a text before the first of `stops` to be complete, wherever its pieces end.

    `found` turns true with the cut; from then on everything is dropped.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """What can go out: all but the longest ending that may yet become a stop string."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        cuts = [(start + len(s), start) for s in self._stops if (start := text.find(s)) >= 0]
        if cuts:
            self.found, self._held = True, ""
            return text[: min(cuts)[1]]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` with which `stop` begins, short of the whole of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
