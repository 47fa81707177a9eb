"""The published form of a trained mini: weights, tokenizer, model card, checksums."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dasc_jax.config import ModelConfig
from dasc_jax.models import Params, abstract_params
from dasc_jax.tokenizer import tokenizer_files
from dasc_jax.weights import save_native

SUMS = "SHA256SUMS"


def publish(
    run: Path, name: str, config: ModelConfig, params: Params, args: dict[str, Any], tokens: int
) -> None:
    """Writes `run/model`: the parameters as served, the tokenizer, the log and the card.

    `tokens` is what was trained on, `args` the options of the trainer.
    """
    target = run / "model"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    specs = abstract_params(config, config.dtype)
    stored = {key: jnp.asarray(value, specs[key].dtype) for key, value in params.items()}
    save_native(target, config, stored, tokenizer_files(run / "tokenizer"))
    shutil.copyfile(run / "train.jsonl", target / "train.jsonl")
    (target / "README.md").write_text(_card(run, name, stored, args, tokens))
    write_sums(target)


def write_sums(directory: Path) -> None:
    """Writes SHA256SUMS over every other file, in the format of `sha256sum -c`."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != SUMS)
    lines = [f"{_digest(file)}  {file.relative_to(directory)}\n" for file in files]
    (directory / SUMS).write_text("".join(lines))


def check_sums(directory: Path) -> list[str]:
    """Names of files that are missing or differ from SHA256SUMS."""
    lines = (directory / SUMS).read_text().splitlines()
    pairs = (line.split("  ", 1) for line in lines)
    return [
        name
        for digest, name in pairs
        if not (directory / name).is_file() or _digest(directory / name) != digest
    ]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _card(run: Path, name: str, params: Params, args: dict[str, Any], tokens: int) -> str:
    last = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()][-1:]
    right = last[0]["right"] if last else {}
    rows = "\n".join(f"| {kind} | {value:.3f} |" for kind, value in right.items())
    millions = sum(value.size for value in params.values()) / 1e6
    start = f"`{args['init']}`" if args["init"] else "random weights"
    return f"""# {name}

{millions:.2f} million parameters, bfloat16 (decay parameters and sigmoid router float32), trained
by `scripts/train_demo.py` with this project's own models and ops, from {start}.

- Command: `python scripts/train_demo.py {name} --novels {Path(args["novels"]).name} --out RUN
  --steps {args["steps"]} --batch-tokens {args["batch_tokens"]} --batch-rows {args["batch_rows"]}
  --peak-rate {args["peak_rate"]} --seed {args["seed"]}`
- Data: {tokens / 1e6:,.0f} million tokens, padding included: generated retrieval, tracking,
  counting and question tasks in RULER's templates, with words, numbers, UUIDs and names of the
  training pools only (`dasc_jax/evals/pools.py`), and five of Jane Austen's novels (public domain,
  from Debian's r-cran-janeaustenr). The sixth, Northanger Abbey, is the haystack of the
  evaluations.
- Context: rows of 512 to 4,096 tokens.
- Log: `train.jsonl`, one object every {args["log_steps"]} steps.

It continues RULER prompts and the question templates it was trained on. It is no general language
model: it knows Austen's English, follows no instructions, and is here so that cache policies can be
judged on a model that really retrieves.

Last {args["log_steps"]} training steps, rows whose answers are all right given the tokens before:

| kind | right |
| --- | --- |
{rows}

(Multi-value, multi-query and common-word answers are lists whose order is not given away by the
prompt: they are rarely right word for word, though RULER's score of the generated lists is.)
"""
