"""One choice of a response as it grows: events of the engine in, text with its tokens out."""

from typing import NamedTuple

from dasc_jax.engine.request import PromptLogprobs, RequestResult, TokenEvent
from dasc_jax.server.detokenize import Detokenizer, StopStrings, offsets
from dasc_jax.server.protocol import Call, ServedModel


class TokenLogprob(NamedTuple):
    """A token with its log-probability, the likeliest ones, and where its text begins.

    The first token of an echoed prompt follows on nothing: its `logprob` and `top` are None.
    """

    token: int
    logprob: float | None
    top: dict[int, float] | None
    offset: int


class Delta(NamedTuple):
    """What a choice gained since the last delta; `finish` and `result` come with the last one."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: str | None = None
    result: RequestResult | None = None


class Choice:
    """The state of one choice: its text so far is all that was put out plus what is held back.

    Text is held back while a UTF-8 character or a stop string may still be incomplete; its tokens
    wait with it. A token that ends the request (end of text, `stop_token_ids`) adds no text.
    """

    def __init__(self, call: Call, index: int, model: ServedModel) -> None:
        sampling = call.requests[index].sampling
        self._ends = set(sampling.stop_token_ids)
        self._ends |= set() if sampling.ignore_eos else model.stop_ids
        self._detokenizer = Detokenizer(model.tokenizer)
        self._stops = StopStrings(call.stops)
        self._has_text = model.tokenizer is not None
        self._wants_logprobs = call.top_logprobs is not None
        self._prompt, self._prompt_only = call.requests[index].prompt, call.prompt_only
        self._tokenizer = model.tokenizer
        self._text = call.echoes[index] if call.echoes else ""
        self._echoed = len(self._text)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.generated = 0
        self.result: RequestResult | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string came; the engine knows nothing of those."""
        return self._stops.found

    def push(self, event: TokenEvent) -> Delta | None:
        """Take one event; a delta where there is something to show."""
        if event.prompt_logprobs is not None:
            self._add_prompt(event.prompt_logprobs)
        if event.token is not None and not self.stopped and not self._prompt_only:
            self._add(event.token, event)
        if event.result is not None:
            return self._finish(event.result)
        return self._delta() if self._text or (self._tokens and not self._has_text) else None

    def _add(self, token: int, event: TokenEvent) -> None:
        self.generated += 1
        self._tokens.append(token)
        if self._wants_logprobs and event.logprob is not None:
            top = event.top_logprobs or {}
            offset = self._echoed + self._detokenizer.length
            self._logprobs.append(TokenLogprob(token, event.logprob, top, offset))
        if token not in self._ends:
            self._text += self._stops.push(self._detokenizer.push(token))

    def _add_prompt(self, known: PromptLogprobs) -> None:
        scores = [(None, None), *known]
        places = offsets(self._prompt, self._tokenizer)
        for token, (logprob, top), place in zip(self._prompt, scores, places, strict=True):
            self._logprobs.append(TokenLogprob(token, logprob, top, place))

    def _finish(self, result: RequestResult) -> Delta:
        self.result = result
        finish = "length" if self._prompt_only else result.finish_reason
        if not self.stopped:
            self._text += self._stops.push(self._detokenizer.finish())
            self._text += self._stops.finish()
        return self._delta("stop" if self.stopped else finish, result)

    def _delta(self, finish: str | None = None, result: RequestResult | None = None) -> Delta:
        delta = Delta(self._text, tuple(self._tokens), tuple(self._logprobs), finish, result)
        self._text, self._tokens, self._logprobs = "", [], []
        return delta
