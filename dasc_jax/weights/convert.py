"""Released checkpoints to native Orbax directories, streaming: the program behind
`scripts/convert.py`."""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import jax
import orbax.checkpoint.experimental.v1 as ocp
import tyro
from jaxtyping import Array
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dasc_jax.config import ModelConfig
from dasc_jax.tokenizer import tokenizer_files
from dasc_jax.weights.audit import Manifest, audit
from dasc_jax.weights.native import TREE, host_device, storage_context, write_sidecars
from dasc_jax.weights.restore import stream_params

GROUP_BYTES = 2**30
"""Parameters are written in groups of about this many bytes (or half the largest, if that is
less)."""


@dataclasses.dataclass(frozen=True)
class ConvertArgs:
    """Convert a released Kimi-Linear or Qwen3-Next checkpoint to a native Orbax directory.

    SOURCE is a Hugging Face directory on disk: config.json, *.safetensors (one file, or shards with
    their index) and tokenizer files. Nothing is downloaded. The result, DESTINATION, loads faster
    and needs no interleaved weights to be taken apart; the server and every script accept either
    form.

    All tensors are checked before anything is written: a missing, extra or misshapen one ends the
    program with exit code 1 and a list. Host memory stays around a few times the largest parameter,
    not the size of the model.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Directory of the released checkpoint."""
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DESTINATION")]
    """Directory to create; must not hold a checkpoint already."""
    dtype: Literal["bfloat16", "float32", "float16"] | None = None
    """Data type of the weights on disk; default: what config.json says. Decay parameters and, for
    Kimi, the router stay float32."""


def main(argv: list[str] | None = None) -> int:
    """Runs the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(ConvertArgs, args=argv, prog="convert")
    console = Console()
    try:
        config = ModelConfig.from_hf(args.source)
        config = dataclasses.replace(config, dtype=args.dtype or config.dtype)
        manifest = audit(args.source, config, config.dtype)
        if manifest.skipped:
            console.print(
                f"skipped on purpose ({len(manifest.skipped)}): {', '.join(manifest.skipped)}"
            )
        with _progress(console) as bar:
            task = bar.add_task("convert", total=manifest.nbytes)
            convert(
                args.source,
                args.destination,
                config,
                manifest,
                lambda n: bar.update(task, advance=n),
            )
    except (OSError, ValueError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 1
    console.print(f"{len(manifest.specs)} parameters written to {args.destination}")
    return 0


def _progress(console: Console) -> Progress:
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def convert(
    source: Path,
    destination: Path,
    config: ModelConfig,
    manifest: Manifest,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Writes the audited checkpoint of `source` as a native directory, a group of parameters at a
    time.

    Raises FileExistsError when `destination` holds a checkpoint. An interrupted conversion leaves
    no `config.json`, so that its remains are never loaded, and is overwritten by the next one.
    """
    if (destination / TREE).exists() or (destination / "config.json").exists():
        raise FileExistsError(f"{destination} holds a checkpoint already")
    destination.mkdir(parents=True, exist_ok=True)
    tree = str((destination / TREE).absolute())
    for remains in destination.glob(f"{TREE}*"):
        shutil.rmtree(remains)
    for group in _groups(manifest, on_bytes):
        with storage_context():
            ocp.partial.save(tree, group)
    ocp.partial.finalize(tree)
    write_sidecars(destination, config, tokenizer_files(source))


def _groups(
    manifest: Manifest, on_bytes: Callable[[int], None] | None
) -> Iterator[dict[str, Array]]:
    budget, device = min(GROUP_BYTES, manifest.largest // 2), host_device()
    group: dict[str, Array] = {}
    size = 0
    for name, value in stream_params(manifest, on_bytes):
        # Orbax copies numpy arrays before it writes them, but not device arrays.
        group[name] = jax.device_put(value, device)
        size += value.nbytes
        del value
        if size >= budget:
            yield group
            group, size = {}, 0
    if group:
        yield group


if __name__ == "__main__":
    sys.exit(main())
