"""Mixture of experts: both routers, the grouped matmuls of the chosen experts, the shared one."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from dasc_jax.config import MoEConfig
from dasc_jax.models.layers import FeedForward, Linear
from dasc_jax.parallel import own_range, sum_over_ranks
from pallas_kernels import expert_mlp


class Router(nnx.Module):
    """The `top_k` experts of each token and their weights, in float32.

    softmax (Qwen3-Next): probabilities over all experts, renormalised over the chosen ones.
    sigmoid (Kimi-Linear): scores of their own, chosen by score + bias within the best groups; the
    weights are the scores without the bias (`weights_use_bias` gives the released remote code's,
    with it), renormalised and scaled once.
    """

    def __init__(self, width: int, config: MoEConfig, dtype: jnp.dtype):
        sigmoid = config.scoring == "sigmoid"
        self.config = config
        self.kernel = nnx.Param(
            jnp.zeros((width, config.num_experts), jnp.float32 if sigmoid else dtype)
        )
        if sigmoid:
            self.bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))

    def __call__(
        self, h: Float[Array, "T D"]
    ) -> tuple[Float32[Array, "T top"], Int32[Array, "T top"]]:
        c = self.config
        scores = self._scores(h)
        if c.scoring == "softmax":
            weights, chosen = jax.lax.top_k(scores, c.top_k)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            return weights / total if c.renormalize else weights, chosen
        biased = scores + self.bias[...]
        _, chosen = jax.lax.top_k(self._best_groups(biased), c.top_k)
        picked = biased if c.weights_use_bias else scores
        weights = jnp.take_along_axis(picked, chosen, axis=-1)
        if c.renormalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * c.scaling, chosen

    def probabilities(self, h: Float[Array, "T D"]) -> Float32[Array, "T E"]:
        """How much the router likes each expert, as shares that sum to one."""
        scores = self._scores(h)
        return scores / jnp.sum(scores, axis=-1, keepdims=True)

    def _scores(self, h: Float[Array, "T D"]) -> Float32[Array, "T E"]:
        logits = _product(h, self.kernel[...])
        act = jax.nn.sigmoid if self.config.scoring == "sigmoid" else jax.nn.softmax
        return act(logits)

    def _best_groups(self, biased: Float32[Array, "T E"]) -> Float32[Array, "T E"]:
        """Leave only the `top_groups` groups with the largest sum of their two best scores."""
        c = self.config
        if c.groups == 1:
            return biased
        grouped = biased.reshape(biased.shape[0], c.groups, -1)
        strength = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        _, best = jax.lax.top_k(strength, c.top_groups)
        allowed = jnp.any(jax.nn.one_hot(best, c.groups, dtype=bool), axis=1)
        return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(biased.shape)


MANY_TOKENS = 256
"""From here on, a GPU multiplies thrice on tensor cores sooner than once in float32."""


def _product(h: Float[Array, "T D"], kernel: Float[Array, "D E"]) -> Float32[Array, "T E"]:
    # A GPU would round float32 to TF32, and so change which experts are chosen.
    def whole(h: jax.Array, kernel: jax.Array) -> jax.Array:
        logits = jnp.matmul(h.astype(kernel.dtype), kernel, precision="highest")
        return logits.astype(jnp.float32)

    types = (h.dtype, kernel.dtype) == (jnp.bfloat16, jnp.float32)
    if not types or h.shape[0] < MANY_TOKENS:
        return whole(h, kernel)
    return jax.lax.platform_dependent(h, kernel, default=whole, cuda=product_of_parts)


def product_of_parts(
    h: Float[Array, "T D"], kernel: Float32[Array, "D E"]
) -> Float32[Array, "T E"]:
    """`h @ kernel` of bfloat16 `h`, as exact as in float32: the kernel's 24 bits are three parts of
    8, whose products with `h` are exact and are added up in float32."""
    parts, rest = [], kernel
    for _ in range(3):
        # Unlike casts there and back, XLA does not take it for nothing.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    each = jnp.matmul(h, jnp.concatenate(parts, axis=1), preferred_element_type=jnp.float32)
    large, middle, small = jnp.split(each, 3, axis=1)
    return small + middle + large


class Experts(nnx.Module):
    """All routed experts of a rank, stacked: `gate_up [E, D, 2I]` (gate, then up) and
    `down [E, I, D]`."""

    def __init__(self, width: int, config: MoEConfig, dtype: jnp.dtype, tp: int = 1):
        experts, inner = config.num_experts // tp, config.intermediate
        self.tp = tp
        self.gate_up = nnx.Param(jnp.zeros((experts, width, 2 * inner), dtype))
        self.down = nnx.Param(jnp.zeros((experts, inner, width), dtype))

    def __call__(
        self,
        h: Float[Array, "T D"],
        weights: Float32[Array, "T top"],
        chosen: Int32[Array, "T top"],
    ) -> Float32[Array, "T D"]:
        """What this rank's experts make of the tokens that chose them, weighted and added up."""
        experts = self.down.shape[0]
        chosen = own_range(chosen, experts, experts, self.tp)
        out = expert_mlp(h, self.gate_up[...], self.down[...], chosen)
        return jnp.einsum("tk,tkd->td", weights, out.astype(jnp.float32), precision="highest")

    def train_forward(
        self,
        h: Float[Array, "T D"],
        weights: Float32[Array, "T top"],
        chosen: Int32[Array, "T top"],
    ) -> Float32[Array, "T D"]:
        """The same by running every token through every expert: for few, small experts, where it
        beats sorting and keeps the backward pass free of scatters."""
        share = jnp.sum(jax.nn.one_hot(chosen, self.down.shape[0]) * weights[..., None], axis=1)
        gate, up = jnp.split(jnp.einsum("td,edi->tei", h, self.gate_up[...]), 2, axis=-1)
        inner = jax.nn.silu(gate) * up * share[..., None].astype(h.dtype)
        return jnp.einsum("tei,eid->td", inner, self.down[...], preferred_element_type=jnp.float32)


class MoE(nnx.Module):
    """Routed experts plus the shared expert (with a sigmoid gate of its own in Qwen3-Next).

    Ranks add up what their experts and their part of the shared one say once, together.
    """

    def __init__(self, width: int, config: MoEConfig, dtype: jnp.dtype, tp: int = 1):
        self.router = Router(width, config, dtype)
        self.experts = Experts(width, config, dtype, tp)
        self.shared = FeedForward(width, config.shared_intermediate, dtype)
        self.gated, self.tp = config.shared_gate, tp
        if config.shared_gate:
            self.shared_gate = Linear(width, 1, dtype)

    def __call__(
        self, h: Float[Array, "T D"], live: Bool[Array, "T"] | None = None
    ) -> Float[Array, "T D"]:
        """Tokens that are not `live` reach no routed expert; None: all do."""
        weights, chosen = self.router(h)
        if live is not None:
            chosen = jnp.where(live[:, None], chosen, self.router.config.num_experts)
        return self._with_shared(h, self.experts(h, weights, chosen))

    def train_forward(
        self, h: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T D"], Float32[Array, ""], Float32[Array, "E"]]:
        """(y, the balance loss of Switch Transformers Eq. 4, the share of choices an expert got).

        The loss is 1 where every expert gets the same share of tokens and of probability.
        """
        weights, chosen = self.router(h)
        experts = self.router.config.num_experts
        load = jnp.mean(jax.nn.one_hot(chosen, experts), axis=(0, 1))
        balance = experts * jnp.sum(load * jnp.mean(self.router.probabilities(h), axis=0))
        return self._with_shared(h, self.experts.train_forward(h, weights, chosen)), balance, load

    def _with_shared(
        self, h: Float[Array, "T D"], routed: Float32[Array, "T D"]
    ) -> Float[Array, "T D"]:
        shared = self.shared(h)
        if self.gated:
            shared = jax.nn.sigmoid(self.shared_gate(h)) * shared
        return sum_over_ranks(routed.astype(h.dtype) + shared, self.tp)
