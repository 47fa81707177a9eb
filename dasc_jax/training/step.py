"""One optimiser step: loss, AdamW, and the balance of the experts."""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32

from dasc_jax.config import ModelConfig
from dasc_jax.models import Params, abstract_params, functions
from dasc_jax.training.attention import causal_attention
from dasc_jax.training.data import Batch
from dasc_jax.types import AnyArray

TEXT_WEIGHT = 0.25
"""Of the mean loss of text that is no answer, beside the mean loss of answers."""
BALANCE_WEIGHT = 0.01
BIAS_STEP = 1e-3
"""How far a router's bias moves towards an expert that gets too little, a step (DeepSeek-V3 2.1.2,
which Kimi-Linear follows)."""

DECAYED = re.compile(r"(kernel|gate_up|experts\.down|k_up|v_up)$")


class TrainState(NamedTuple):
    """float32 master parameters, the optimiser's moments, and the number of steps taken."""

    params: Params
    moments: Any
    step: Int32[Array, ""]


class Report(NamedTuple):
    """Of one step: the three losses, and of each row whether every token of its answers, given the
    ones before, was the most likely."""

    answer: Float32[Array, ""]
    text: Float32[Array, ""]
    balance: Float32[Array, ""]
    right: Float32[Array, "B"]


def learning_rate(step: int, peak: float, steps: int) -> float:
    """Warms up linearly over at most 300 steps, then falls by a cosine to a twentieth."""
    warmup = max(1, min(300, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def optimizer() -> optax.GradientTransformation:
    """AdamW without its rate: gradients clipped to norm 1, matrices decayed by 0.1."""

    def decayed(params: Params) -> dict[str, bool]:
        return {name: bool(DECAYED.search(name)) for name in params}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(0.1, mask=decayed),
    )


def make_step(config: ModelConfig, transform: optax.GradientTransformation, dtype: str):
    """`(TrainState, Batch, rate) -> (TrainState, Report)`, to be jitted. Computes in `dtype`."""
    train = functions(config, dtype).train
    specs = abstract_params(config, dtype)

    def loss(params: Params, batch: Batch):
        cast = {name: value.astype(specs[name].dtype) for name, value in params.items()}
        out = train(cast, jnp.asarray(batch.tokens), causal_attention)
        answer, text, right = _losses(out.logits, batch)
        balance = jnp.mean(out.balance)
        total = answer + TEXT_WEIGHT * text + BALANCE_WEIGHT * balance
        return total, (Report(answer, text, balance, right), out.load)

    def step(
        state: TrainState, batch: Batch, rate: Float32[Array, ""]
    ) -> tuple[TrainState, Report]:
        gradients, (report, load) = jax.grad(loss, has_aux=True)(state.params, batch)
        updates, moments = transform.update(gradients, state.moments, state.params)
        params = jax.tree.map(lambda value, update: value - rate * update, state.params, updates)
        return TrainState(_balanced(params, load), moments, state.step + 1), report

    return step


def _losses(
    logits: Float32[Array, "B T vocab"], batch: Batch
) -> tuple[Float32[Array, ""], Float32[Array, ""], Float32[Array, "B"]]:
    """Answer loss, text loss, and which rows answer right; each token predicts the next."""
    logits, targets = logits[:, :-1], batch.tokens[:, 1:]
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - chosen
    weight = batch.answer[:, 1:]
    real = jnp.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
    text = (real & (weight == 0)).astype(jnp.float32)
    right = jnp.all((weight == 0) | (jnp.argmax(logits, axis=-1) == targets), axis=-1)
    return _mean(loss, weight), _mean(loss, text), right.astype(jnp.float32)


def _mean(values: jax.Array, weights: AnyArray) -> jax.Array:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-6)


def _balanced(params: Params, load: Float32[Array, "M E"]) -> Params:
    """Router biases, which have no gradient, moved against the experts' shares of the tokens."""
    biases = sorted(
        (name for name in params if name.endswith("router.bias")),
        key=lambda name: int(name.split(".")[1]),
    )
    moved = {
        name: params[name] + BIAS_STEP * jnp.sign(jnp.mean(share) - share)
        for name, share in zip(biases, load, strict=False)
    }
    return {**params, **moved}
