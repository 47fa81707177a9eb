"""Make `checkpoints/demo` anew: a small hybrid model with random weights from a fixed seed.

    python scripts/make_demo_checkpoint.py checkpoints/demo

Stored in bfloat16: half the bytes in the repository, and loading them as float32 is exact, so that
a run in either dtype starts from the same weights.
"""

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from dasc_jax.config import DeltaConfig, MLAConfig, ModelConfig, MoEConfig
from dasc_jax.horizons import EPSILON, GATE_INPUT
from dasc_jax.model import Model, random_model
from dasc_jax.tokenizer import BYTE_SPECIALS, tokenizer_files, write_byte_tokenizer
from dasc_jax.weights import save_native

SEED = 2026
PAD, END = 256, 258
"""<|endoftext|> and <|im_end|> of the byte tokenizer."""

HORIZON_LOG2 = (3.0, 2.8)
"""Mean and deviation of log2 of the horizons: as in Kimi-Linear, about 36 % exceed 16 tokens."""
SHORTEST, LONGEST = 1.0, 4096.0


@dataclass(frozen=True)
class Args:
    """Write the demo checkpoint: Kimi-Linear's architecture, 4 layers, about a million weights."""

    destination: tyro.conf.Positional[Path]
    """Directory to write; what it holds is replaced."""
    seed: int = SEED
    """Of all weights. The checkpoint in the repository has the default."""


def demo_config() -> ModelConfig:
    """Three KDA layers and one MLA layer; a dense feed-forward block, then experts."""
    return ModelConfig(
        family="kimi_linear",
        vocab_size=256 + len(BYTE_SPECIALS),
        hidden_size=128,
        num_layers=4,
        layer_kinds=("delta", "delta", "delta", "attention"),
        ffn_kinds=("dense", "moe", "moe", "moe"),
        norm_eps=1e-5,
        zero_centred_norm=False,
        dense_intermediate=256,
        delta=DeltaConfig("kda", 2, 2, 64, 64, gate_rank=64, norm_eps=1e-5),
        attention=MLAConfig(2, nope_dim=64, shared_dim=32, value_dim=64, latent_dim=64),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            intermediate=64,
            shared_intermediate=64,
            scoring="sigmoid",
            renormalize=True,
            scaling=1.0,
            groups=1,
            top_groups=1,
            shared_gate=False,
        ),
        dtype="bfloat16",
        max_context=4096,
        bos_token_id=None,
        eos_token_ids=(END,),
        pad_token_id=PAD,
    )


def demo_model(seed: int = SEED) -> Model:
    """The model of `checkpoints/demo`, without its tokenizer."""
    model = random_model(demo_config(), "bfloat16", seed)
    random = np.random.default_rng(seed)
    params = dict(model.params)
    for layer in model.config.recurrent_layers:
        prefix = f"layers.{layer}.mixer.decay."
        bias = _decay_bias(np.asarray(params[prefix + "A_log"]), random)
        params[prefix + "dt_bias"] = jnp.asarray(bias)
        # Gates that move little with the input keep a unit near its static horizon.
        params[prefix + "up.kernel"] = params[prefix + "up.kernel"] * 0.5
    # Sharper than an untrained head: greedy choices then do not hang on the last bits.
    params["norm.weight"] = params["norm.weight"] * 2
    return replace(model, params=params)


def _decay_bias(A_log: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """dt_bias [H, K] that gives log-normal horizons: Eq. 2 and 3 solved for it."""
    shape = (len(A_log), demo_config().delta.key_dim)
    horizon = np.exp2(random.normal(*HORIZON_LOG2, shape)).clip(SHORTEST, LONGEST)
    rate = -np.log(EPSILON) / (horizon * np.exp(A_log.astype(np.float64))[:, None])
    return (np.log(np.expm1(rate)) - GATE_INPUT).astype(np.float32)


def main(args: Args) -> int:
    """Write the directory; the one there is replaced only once the new one is complete."""
    model = demo_model(args.seed)
    with TemporaryDirectory() as folder:
        tokenizer, written = Path(folder) / "tokenizer", Path(folder) / "demo"
        write_byte_tokenizer(tokenizer)
        save_native(written, model.config, model.params, tokenizer_files(tokenizer))
        shutil.rmtree(args.destination, ignore_errors=True)
        shutil.copytree(written, args.destination)
    weights = sum(value.size for value in model.params.values())
    size = sum(file.stat().st_size for file in args.destination.rglob("*") if file.is_file())
    Console().print(f"{weights:,} weights, {size / 1e6:.1f} MB in {args.destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
