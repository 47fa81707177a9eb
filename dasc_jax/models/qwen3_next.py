"""Qwen3-Next: GDN layers, every fourth a gated attention layer; softmax-routed experts."""

from dasc_jax.models.attention import GatedAttention
from dasc_jax.models.hybrid import HybridModel


class Qwen3Next(HybridModel):
    """The Qwen3-Next decoder (`model_type: qwen3_next`)."""

    attention = GatedAttention
