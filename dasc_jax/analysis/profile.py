"""Decay parameters and horizons of a checkpoint directory, without reading its other weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jaxtyping import Float64

from dasc_jax.config import ModelConfig
from dasc_jax.horizons import EPSILON, GATE_INPUT, retention_horizons
from dasc_jax.published import PUBLISHED, published_profile
from dasc_jax.weights.audit import WeightError, audit, is_safetensors
from dasc_jax.weights.native import TREE, is_native
from dasc_jax.weights.restore import stream_params


def load_profile(
    model: str | Path, *, a: float = GATE_INPUT, eps: float = EPSILON
) -> tuple[ModelConfig, list[Float64[np.ndarray, "H *K"]]]:
    """Configuration and static horizons of a published profile or of a checkpoint directory.

    Raises FileNotFoundError for what is neither, ConfigError, WeightError or HorizonError for a
    checkpoint that cannot be used.
    """
    if model in PUBLISHED:
        return published_profile(str(model), a=a, eps=eps)
    path = Path(model)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{str(model)!r} is neither a directory nor a published profile"
            f" ({', '.join(PUBLISHED)})"
        )
    config = ModelConfig.from_hf(path)
    return config, retention_horizons(decay_params(path, config), config, a=a, eps=eps)


def decay_params(path: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """`layers.{i}.mixer.decay.A_log` and `.dt_bias` of every recurrent layer, on the host.

    A released directory is audited as a whole, by its headers. Raises WeightError when it does not
    match `config`, or holds neither safetensors nor a native tree.
    """
    names = {
        f"layers.{layer}.mixer.decay.{tensor}"
        for layer in config.recurrent_layers
        for tensor in ("A_log", "dt_bias")
    }
    if is_native(path):
        return _native(path, names)
    if not is_safetensors(path):
        raise WeightError(f"{path} holds neither *.safetensors nor a native Orbax tree")
    manifest = audit(path, config, config.dtype)
    pieces = tuple(piece for piece in manifest.pieces if piece.param in names)
    with _without_read_advice():
        return dict(stream_params(manifest._replace(pieces=pieces)))


@contextmanager
def _without_read_advice() -> Iterator[None]:
    # Orbax warns about every small tensor that it reads more than the tensor's bytes.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _native(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    tree = str((path / TREE).absolute())
    stored = ocp.metadata(tree).metadata
    if missing := tuple(sorted(names - stored.keys())):
        raise WeightError(f"{tree} lacks decay parameters", missing=missing)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        loaded = ocp.load(tree, {name: np.empty(stored[name].shape, np.float32) for name in names})
    return {name: np.asarray(value) for name, value in loaded.items()}
