"""Safetensors or native checkpoints to (sharded) `jax.Array`s, with bounded host memory.

Safetensors are read through Orbax's safetensors layout, a few tensors at a time. One call for the
whole directory would hold the file tensors and the parameters made of them together (twice the
model); one call a tensor would parse a shard's header for each of 75,000 experts. So tensors are
read in batches of at most a quarter of the largest tensor (and 128 MiB), and each is written
straight to its place in the one or few parameters that are being assembled, in their final layout
and dtype.

Host memory at any time: parameters already placed (none on a GPU host), plus the parameters in
assembly, plus one batch. On CPU devices an assembled parameter becomes the array without a copy.
"""

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jaxtyping import Array

from dasc_jax.config import ModelConfig
from dasc_jax.weights.audit import FLOATS, Manifest, Piece, WeightError, audit, is_safetensors
from dasc_jax.weights.native import host_device, is_native, load_native
from dasc_jax.weights.permute import Orders, Placement, check_orders, placement

MAX_BATCH_BYTES = 128 * 2**20
MAX_IN_FLIGHT_BYTES = 64 * 2**20
MIN_CHUNK_BYTES = 2**20


def load_params(
    path: str | Path,
    config: ModelConfig,
    dtype: str,
    mesh: Mesh | None = None,
    shardings: Callable[[str], Sharding] | None = None,
    *,
    orders: Orders | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, Array]:
    """The parameters of `config` from a released (safetensors) or native directory.

    Parameters marked float32 in `param_specs` stay float32, all others are cast to `dtype`. Each is
    read once; a device receives what `shardings(path)` gives it, else what its rank of `mesh`
    holds, else the default device all of it. `orders` puts head bundles in another order, and a
    mesh of several ranks some tensors in rank order: see `dasc_jax.weights.permute`. `on_bytes(n)`
    is called as n more bytes of the checkpoint have been read.

    Raises:
        WeightError: before anything is loaded, when the checkpoint does not hold exactly these
            parameters.
        ConfigError, ValueError: the ranks do not divide the model; orders that are no permutations.
    """
    path = Path(path)
    where = _placement(config, mesh, shardings, orders)
    if is_native(path):
        return load_native(path, config, dtype, where)
    if not is_safetensors(path):
        raise WeightError(f"{path} holds neither *.safetensors nor a native Orbax tree")
    manifest = audit(path, config, dtype)
    params = {}
    for name, value in stream_params(manifest, on_bytes):
        # Waiting keeps the host buffers of pending transfers from piling up.
        params[name] = jax.block_until_ready(where.place(name, value))
    return {name: params[name] for name in manifest.specs}


def _placement(
    config: ModelConfig,
    mesh: Mesh | None,
    shardings: Callable[[str], Sharding] | None,
    orders: Orders | None,
) -> Placement:
    if mesh is not None and shardings is None:
        return placement(config, mesh, orders)
    if orders is not None:
        check_orders(config, orders)
    default = SingleDeviceSharding(jax.local_devices()[0])
    return Placement(config, shardings or (lambda _: default), orders=orders)


def stream_params(
    manifest: Manifest, on_bytes: Callable[[int], None] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter as a host array in its final layout and dtype, one by one, as soon as
    complete."""
    waiting = Counter(piece.param for piece in manifest.pieces)
    by_tensor: dict[str, list[Piece]] = {}
    for piece in manifest.pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    open_params: dict[str, np.ndarray] = {}
    with ThreadPoolExecutor() as pool:
        for batch in _batches(manifest, by_tensor):
            values = _read(manifest, batch)
            work = [(piece, values[name]) for name in batch for piece in by_tensor[name]]
            for param in {piece.param for piece, _ in work} - open_params.keys():
                open_params[param] = _buffer(manifest.specs[param])
            list(pool.map(lambda item: _write(open_params[item[0].param], *item), work))
            del values
            read = sum(manifest.tensors[name].nbytes for name in batch)
            waiting.subtract(piece.param for piece, _ in work)
            done = dict.fromkeys(piece.param for piece, _ in work if not waiting[piece.param])
            del work
            for param in done:
                yield param, open_params.pop(param)
            if on_bytes is not None:
                on_bytes(read)


def _batches(manifest: Manifest, names: Iterable[str]) -> Iterator[list[str]]:
    """Runs of tensors of one file that fit the batch budget together; a larger tensor goes
    alone."""
    tensors = manifest.tensors
    budget = min(MAX_BATCH_BYTES, manifest.largest // 4)
    batch: list[str] = []
    size = 0
    for name in names:
        tensor = tensors[name]
        if batch and (tensor.file != tensors[batch[0]].file or size + tensor.nbytes > budget):
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += tensor.nbytes
    if batch:
        yield batch


def _read(manifest: Manifest, names: list[str]) -> dict[str, np.ndarray]:
    """The named tensors of one file on the host, as they are stored."""
    sharding = SingleDeviceSharding(host_device())
    wanted = {
        name: jax.ShapeDtypeStruct(tensor.shape, FLOATS[tensor.kind], sharding=sharding)
        for name in names
        for tensor in (manifest.tensors[name],)
    }
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    in_flight = min(MAX_IN_FLIGHT_BYTES, max(MIN_CHUNK_BYTES, manifest.largest // 16))
    context.memory.read_concurrent_bytes = in_flight
    context.safetensors.read_chunk_bytes = max(MIN_CHUNK_BYTES, in_flight // 4)
    with context:
        arrays = ocp.load(str(manifest.tensors[names[0]].file), wanted)
    return {name: np.asarray(array) for name, array in arrays.items()}


def _buffer(spec: jax.ShapeDtypeStruct) -> np.ndarray:
    # Pages of its own, not malloc: aligned well enough for a CPU array without a copy, and given
    # back at once, where a heap that grew between short-lived batches would stay fragmented.
    nbytes = math.prod(spec.shape) * spec.dtype.itemsize
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, spec.dtype).reshape(spec.shape)


def _write(param: np.ndarray, piece: Piece, value: np.ndarray) -> None:
    source = piece.read(value)
    target = param[piece.at]
    if target.shape != source.shape:
        target = target.reshape(source.shape, copy=False)
    if source.dtype == target.dtype:
        # Plain integers of the same width: numpy copies them faster and without the interpreter
        # lock.
        bits = np.dtype(f"u{source.dtype.itemsize}")
        source, target = source.view(bits), target.view(bits)
    np.copyto(target, source, casting="unsafe")
