"""Before anything is loaded: headers of a safetensors checkpoint against the parameter table.

Only headers are read. Every tensor must be used exactly once or be skipped on purpose; all that is
missing, extra or misshapen is reported in one `WeightError`.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

from dasc_jax.config import ModelConfig
from dasc_jax.weights.names import Piece, pieces, skipped
from dasc_jax.weights.specs import param_specs

FLOATS = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""Data types of a safetensors header that a weight may have."""


class WeightError(ValueError):
    """A checkpoint that does not hold exactly the weights its configuration needs.

    `missing`, `extra` and `misshapen` list tensor (or parameter) names; the message lists all of
    them.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
        misshapen: tuple[str, ...] = (),
    ):
        self.missing, self.extra, self.misshapen = missing, extra, misshapen
        lists = (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        lines = [f"  {kind} ({len(names)}): {', '.join(names)}" for kind, names in lists if names]
        super().__init__("\n".join([message, *lines]))


class Tensor(NamedTuple):
    """A tensor as a header declares it; `kind` is the header's data type, `nbytes` its length
    there."""

    file: Path
    shape: tuple[int, ...]
    kind: str
    nbytes: int


class Manifest(NamedTuple):
    """A checkpoint that passed the audit: what to read, in which order, and what is left unread.

    `nbytes` counts all file tensors that will be read, `largest` the largest of them.
    """

    tensors: dict[str, Tensor]
    pieces: tuple[Piece, ...]
    skipped: tuple[str, ...]
    specs: dict[str, jax.ShapeDtypeStruct]
    nbytes: int
    largest: int


def is_safetensors(path: Path) -> bool:
    """Whether the directory holds a safetensors checkpoint."""
    return any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))


def read_headers(path: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint directory: a single `model.safetensors`, or shards with an
    index.

    Raises WeightError when a shard of the index is absent, shorter than its header says, or holds
    other tensors than the index promises.
    """
    index_file = path / "model.safetensors.index.json"
    if not index_file.is_file():
        single = path / "model.safetensors"
        files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise WeightError(f"no *.safetensors file in {path}")
        return _merged(files)
    promised = json.loads(index_file.read_text())["weight_map"]
    files = [path / name for name in sorted(set(promised.values()))]
    if absent := tuple(file.name for file in files if not file.is_file()):
        raise WeightError(f"{index_file} names shards that are not in {path}", missing=absent)
    tensors = _merged(files)
    placed = {name: tensor.file.name for name, tensor in tensors.items()}
    if placed != promised:
        moved = [name for name in placed if name in promised and placed[name] != promised[name]]
        raise WeightError(
            f"{index_file} disagrees with the shards in {path}"
            + "".join(f"; {n} moved" for n in moved),
            missing=tuple(sorted(promised.keys() - placed.keys())),
            extra=tuple(sorted(placed.keys() - promised.keys())),
        )
    return tensors


def _merged(files: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in tensors:
                raise WeightError(
                    f"{name} is in both {tensors[name].file} and {file}", extra=(name,)
                )
            tensors[name] = tensor
    return tensors


def _header(file: Path) -> dict[str, Tensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= size - 8:
            raise WeightError(f"{file} is not a safetensors file: {size} bytes, header of {length}")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise WeightError(f"{file} has an unreadable header: {error}") from None
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values()]
    if (needed := 8 + length + max(ends, default=0)) > size:
        raise WeightError(f"{file} is truncated: {size} bytes, its header declares {needed}")
    return {
        name: Tensor(
            file,
            tuple(entry["shape"]),
            entry["dtype"],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def audit(path: str | Path, config: ModelConfig, dtype: str) -> Manifest:
    """Checks the safetensors checkpoint at `path` against `config` and plans its loading.

    Raises WeightError listing everything missing, extra, misshapen or of a non-float data type.
    """
    path = Path(path)
    tensors = read_headers(path)
    table = tuple(pieces(config, tensors.keys()))
    wanted = {piece.tensor: piece.shapes for piece in table}
    skips = tuple(sorted(name for name in tensors if skipped(config, name)))
    missing = tuple(name for name in wanted if name not in tensors)
    extra = tuple(sorted(tensors.keys() - wanted.keys() - set(skips)))
    misshapen = tuple(
        complaint
        for name, shapes in wanted.items()
        if name in tensors and (complaint := _complaint(name, tensors[name], shapes))
    )
    if missing or extra or misshapen:
        raise WeightError(
            f"{path} does not match its config ({config.family}, {config.num_layers} layers)",
            missing=missing,
            extra=extra,
            misshapen=misshapen,
        )
    sizes = [tensors[name].nbytes for name in wanted]
    table = _ordered(table, tensors)
    return Manifest(tensors, table, skips, param_specs(config, dtype), sum(sizes), max(sizes))


def _complaint(name: str, tensor: Tensor, shapes: tuple[tuple[int, ...], ...]) -> str | None:
    if tensor.shape not in shapes:
        return f"{name} {list(tensor.shape)} instead of {' or '.join(str(list(s)) for s in shapes)}"
    if tensor.kind not in FLOATS:
        return f"{name} of type {tensor.kind} instead of {'/'.join(FLOATS)}"
    if tensor.nbytes != math.prod(tensor.shape) * FLOATS[tensor.kind].itemsize:
        return f"{name} of {tensor.nbytes} bytes for {tensor.kind} {list(tensor.shape)}"
    return None


def _ordered(table: tuple[Piece, ...], tensors: dict[str, Tensor]) -> tuple[Piece, ...]:
    """Layer order, but the largest tensors (embedding, head) first: while one is read it is held
    more than once, which should happen before the rest of the model fills the memory."""
    largest = max(tensors[piece.tensor].nbytes for piece in table)
    return tuple(sorted(table, key=lambda piece: 2 * tensors[piece.tensor].nbytes < largest))
