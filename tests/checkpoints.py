"""Checkpoints that the weight tests read, change and compare."""

import shutil
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from dasc_jax.config import ModelConfig
from dasc_jax.weights import load_params

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ["kimi_linear_a", "qwen3_next_a"]


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "model.safetensors")


def rewritten(source: Path, target: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A copy of the checkpoint `source` with other tensors."""
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target)
    owned = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(owned, target / "model.safetensors")
    return target


def load(path: Path, dtype: str = "float32", **options) -> dict[str, jax.Array]:
    return load_params(path, ModelConfig.from_hf(path), dtype, **options)


def assert_same(left: dict[str, jax.Array], right: dict[str, jax.Array]) -> None:
    assert list(left) == list(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert np.asarray(value).tobytes() == np.asarray(right[name]).tobytes(), name
