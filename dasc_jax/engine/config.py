"""How an engine is sized; bad combinations are refused, with the numbers, before any allocation."""

from dataclasses import dataclass, field

from dasc_jax.config import ConfigError, DascConfig, ModelConfig
from dasc_jax.layout import CONV_WINDOW
from dasc_jax.types import PAGE


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of one engine.

    Attributes:
        dasc: what checkpoints keep (w_max, quantization) and the default load policy.
        max_context: tokens a request may reach, prompt and output together.
        max_running: requests that hold a recurrent slot at once (and the largest decode batch).
        prefill_tokens: packed tokens of the largest prefill step; longer prompts are cut at
            multiples of 64.
        prefill_requests: most requests in one prefill step, and checkpoints loaded at once.
        pages: attention pages of 64 tokens (page 0 is the sink); None: room for `max_running`
            requests of `max_context` tokens, twice over, so that as much again can stay cached.
        checkpoint_slots: checkpoints the state pool holds besides slot 0; or
        checkpoint_bytes: a byte budget for the state pool, slot 0 included (DASC Eq. 8). None for
            both: four a running request.
        checkpoint_interval: also checkpoint every so many prompt tokens (a multiple of 64).
        max_lineage: most lossy loads a reused state may have behind it, the new one included; None:
            any.
        strict_compile: raise when a step would compile after warm-up, instead of counting it.
        prefix_cache: False switches prefix reuse off: every request runs cold, nothing is kept.
    """

    dasc: DascConfig = field(default_factory=DascConfig)
    max_context: int = 4096
    max_running: int = 8
    prefill_tokens: int = 512
    prefill_requests: int = 4
    pages: int | None = None
    checkpoint_slots: int | None = None
    checkpoint_bytes: int | None = None
    checkpoint_interval: int | None = None
    max_lineage: int | None = None
    strict_compile: bool = False
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_context", "max_running", "prefill_tokens", "prefill_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefill_tokens % PAGE:
            raise ConfigError(
                f"prefill_tokens is {self.prefill_tokens}; it must be a multiple of {PAGE}"
            )
        interval = self.checkpoint_interval
        if interval is not None and (interval < PAGE or interval % PAGE):
            raise ConfigError(
                f"checkpoint_interval is {interval}; checkpoints lie on the grid of {PAGE} tokens"
            )
        if self.checkpoint_slots is not None and self.checkpoint_bytes is not None:
            raise ConfigError(
                f"checkpoint_slots={self.checkpoint_slots} and"
                f" checkpoint_bytes={self.checkpoint_bytes} are both set; give one"
            )
        if self.checkpoint_slots is not None and self.checkpoint_slots < 0:
            raise ConfigError(f"checkpoint_slots is {self.checkpoint_slots}; it must be >= 0")
        if self.max_lineage is not None and self.max_lineage < 0:
            raise ConfigError(f"max_lineage is {self.max_lineage}; it must be >= 0")
        if self.pages is not None and self.pages < 2:
            raise ConfigError(f"pages is {self.pages}; it must be at least 2 (page 0 is the sink)")

    @property
    def context_pages(self) -> int:
        """Pages a request of `max_context` tokens covers."""
        return -(-self.max_context // PAGE)

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the sink included."""
        return self.pages or 1 + 2 * self.max_running * self.context_pages

    @property
    def w_max(self) -> int:
        """The plan's threshold: 0 when the default policy is dense."""
        return 0 if self.dasc.policy == "dense" else self.dasc.w_max

    def check_model(self, model: ModelConfig, window: int) -> None:
        """Refuse what does not fit the model or the plan's refresh window.

        The window counts under every default policy: a request may ask for `wr`.

        Raises:
            ConfigError: the context is longer than the model's, or a prefill step has no room for a
                replay and one page of new tokens; it names the smallest step that has.
        """
        if self.max_context > model.max_context:
            raise ConfigError(
                f"max_context is {self.max_context};"
                f" the model was made for {model.max_context} tokens"
            )
        replay = window + CONV_WINDOW if window else 0
        need = PAGE * (1 + -(-replay // PAGE))  # prefill_tokens is a multiple of PAGE
        if self.prefill_tokens < need:
            raise ConfigError(
                f"prefill_tokens is {self.prefill_tokens};"
                f" a refresh of {window} tokens needs at least {need}"
            )
