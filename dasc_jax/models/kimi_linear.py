"""Kimi-Linear: KDA layers, every fourth (and the last) a NoPE-MLA layer; sigmoid-routed experts."""

from dasc_jax.models.attention import LatentAttention
from dasc_jax.models.hybrid import HybridModel


class KimiLinear(HybridModel):
    """The Kimi-Linear decoder (`model_type: kimi_linear`)."""

    attention = LatentAttention
