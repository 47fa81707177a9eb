"""Native checkpoints: `config.json`, an Orbax tree of the flat parameters in `params/`, tokenizer
files."""

import ctypes
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from dasc_jax.config import NATIVE_FORMAT, ModelConfig
from dasc_jax.parallel import family_name, split_ranks
from dasc_jax.weights.audit import WeightError
from dasc_jax.weights.permute import Placement
from dasc_jax.weights.specs import param_specs

TREE = "params"
CHUNK_BYTES = 4 * 2**20


def is_native(path: Path) -> bool:
    """Whether `path` is a native directory: its configuration says so, beside an Orbax tree."""
    config = path / "config.json"
    return (
        (path / TREE).is_dir()
        and config.is_file()
        and json.loads(config.read_text()).get("format") == NATIVE_FORMAT
    )


def save_native(
    path: str | Path,
    config: ModelConfig,
    params: Mapping[str, Array],
    tokenizer_files: Iterable[str | Path] = (),
) -> None:
    """Writes a native directory that `load_params` and `ModelConfig.from_hf` read back bit for bit.

    Raises FileExistsError when there is a tree already, WeightError when `params` are not exactly
    those of `config` (by path and shape), or stand in the order of the ranks of a mesh.
    """
    path = Path(path)
    _check_order(params)
    _check({name: value.shape for name, value in params.items()}, config, "the parameters to save")
    if (path / TREE).exists():
        raise FileExistsError(f"{path / TREE} exists already")
    with storage_context():
        ocp.save(str((path / TREE).absolute()), dict(params))
    write_sidecars(path, config, tokenizer_files)


def storage_context() -> ocp.Context:
    """How native trees are written: plain chunks small enough that a rank reads little more than
    its shard, uncompressed because the bits of weights hardly compress and decompression bounds
    loading."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    return context


def write_sidecars(path: Path, config: ModelConfig, tokenizer_files: Iterable[str | Path]) -> None:
    """Everything of a native directory but the tree. `config.json` comes last: without it, the
    directory is not a checkpoint, so an interrupted write is never taken for one."""
    path.mkdir(parents=True, exist_ok=True)
    for file in tokenizer_files:
        if Path(file).resolve().parent != path.resolve():
            shutil.copyfile(file, path / Path(file).name)
    (path / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def load_native(path: Path, config: ModelConfig, dtype: str, where: Placement) -> dict[str, Array]:
    """The parameters of a native directory; see `load_params`.

    Each is read straight into its shards, or through the host where rows of it change places.
    """
    tree = str((path / TREE).absolute())
    stored = ocp.metadata(tree).metadata
    _check({name: leaf.shape for name, leaf in stored.items()}, config, tree)
    specs = param_specs(config, dtype)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    params: dict[str, Array] = {}
    host = SingleDeviceSharding(host_device())
    moved = {name for name in specs if where.index(name) is not None}
    for group in _groups(specs):
        wanted = {
            name: jax.ShapeDtypeStruct(
                specs[name].shape,
                specs[name].dtype,
                sharding=host if name in moved else where.shardings(name),
            )
            for name in group
        }
        with context:
            loaded = jax.block_until_ready(ocp.load(tree, wanted))
        # In the same order in every process: a set of names has another in each.
        for name in [name for name in group if name in moved]:
            loaded[name] = jax.block_until_ready(where.place(name, np.asarray(loaded[name])))
        params |= loaded
        del loaded
        _return_freed_memory()
    return {name: params[name] for name in specs}


def host_device() -> Any:
    """The CPU as a `jax.Device`, where there is one beside the accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the accelerator only
        return jax.local_devices()[0]


def _return_freed_memory() -> None:
    """Gives freed heap pages back to the system, where the C library is glibc.

    TensorStore reads on many threads. glibc gives each of them a heap and keeps what is freed
    there, which for a small model adds up to more than its largest tensor.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _groups(specs: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[list[str]]:
    """Largest first, then groups of at most a sixteenth of the largest parameter.

    Beside the finished arrays, Orbax holds its group once more while it reads, and TensorStore the
    chunks in flight: at most the group again, and at most 128 of them.
    """
    sizes = {name: math.prod(spec.shape) * spec.dtype.itemsize for name, spec in specs.items()}
    budget = max(sizes.values()) // 16
    group: list[str] = []
    total = 0
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if group and total + sizes[name] > budget:
            yield group
            group, total = [], 0
        group.append(name)
        total += sizes[name]
    yield group


def _check_order(params: Mapping[str, Array]) -> None:
    # The only parameter that ranks reorder without a change of its shape.
    for name, value in params.items():
        if family_name(name) == "mixer.conv.weight" and split_ranks(value) > 1:
            raise WeightError(
                f"{name} is split over {split_ranks(value)} ranks, its channels in their order:"
                " save the parameters of a model on one device"
            )


def _check(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, what: str) -> None:
    specs = param_specs(config, config.dtype)
    missing = tuple(name for name in specs if name not in shapes)
    extra = tuple(name for name in shapes if name not in specs)
    misshapen = tuple(
        f"{name} {list(shapes[name])} instead of {list(spec.shape)}"
        for name, spec in specs.items()
        if name in shapes and tuple(shapes[name]) != spec.shape
    )
    if missing or extra or misshapen:
        raise WeightError(
            f"{what} do not match the configuration ({config.family}, {config.num_layers} layers)",
            missing=missing,
            extra=extra,
            misshapen=misshapen,
        )
