"""Packing and unpacking whole state checkpoints of the released models, 37.6 % of them retained."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing
from pallas_kernels.bench.timing import Case, Problem, Run, floor_ms
from pallas_kernels.mgpu import ragged_pack as hopper
from pallas_kernels.mgpu.ragged_pack import Blocking

VALUE = 128
KIMI, QWEN = (20, 32, 128), (36, 32)
"""Units of the models: (layer, head, key channel) rows, (layer, head) blocks of 128 rows."""
SHARE = 0.376
"""Units retained at W_max = 16 in the paper."""
VARIANTS = (Blocking(8), Blocking(16), Blocking(32), Blocking(64))
XLA_INT8_TOLERANCE = 1e-2
"""XLA divides by an approximation on a GPU, which moves a value of int8 by one here and there."""


def cases() -> Iterator[Case]:
    """One checkpoint of each model, and four of the larger table at once."""
    for int8 in (False, True):
        suffix = "_int8" if int8 else ""
        for name, mask, checkpoints in (("kimi", KIMI, 1), ("qwen3", QWEN, 1), ("kimi", KIMI, 4)):
            kept, rows = _rows(mask)
            packed = kept * (VALUE + 4 if int8 else 4 * VALUE)
            shape = f"{name} {checkpoints} x {kept} of {rows} rows"
            # Peers know one checkpoint of single rows.
            single = mask == KIMI and checkpoints == 1
            for op, dense, make in (("pack", kept, _pack), ("unpack", rows, _unpack)):
                floor = floor_ms(checkpoints * (packed + dense * 4 * VALUE))
                called = f"{op}{suffix}" if single else f"ragged_{op}{suffix}"
                yield Case(called, shape, floor, partial(make, mask, int8, checkpoints))


def _rows(mask: tuple[int, ...]) -> tuple[int, int]:
    """Rows retained and rows in all."""
    units, each = int(np.prod(mask)), VALUE if len(mask) == 2 else 1
    return int(SHARE * units) * each, units * each


def _data(mask: tuple[int, ...], int8: bool, checkpoints: int) -> dict[str, Any]:
    """Pools with one slot more than is used, an index and its inverse, slots and states."""
    rng = np.random.default_rng(0)
    units = int(np.prod(mask))
    index = np.sort(rng.permutation(units)[: int(SHARE * units)]).astype(np.int32)
    inverse = np.full(units, -1, np.int32)
    inverse[index] = np.arange(len(index))
    unit = (VALUE,) if len(mask) == 3 else (VALUE, VALUE)
    shape = (checkpoints + 2, len(index), *unit)
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], shape)
    scales = None
    if int8:
        rows, scales = packing.quantize(rows)
    return {
        "rows": rows,
        "scales": scales,
        "temporal": jax.random.normal(keys[1], (mask[0], checkpoints + 1, mask[1], VALUE, VALUE)),
        "index": jnp.asarray(index),
        "inverse": jnp.asarray(inverse),
        "slots": jnp.arange(checkpoints, 0, -1, dtype=jnp.int32),
        "states": jnp.arange(checkpoints, dtype=jnp.int32),
    }


def _pack(mask: tuple[int, ...], int8: bool, checkpoints: int) -> Problem:
    data = _data(mask, int8, checkpoints)
    slots = data["slots"]
    unit = data["rows"].shape[2:]
    dense = packing.take(data["temporal"], data["index"], data["states"], unit)
    expected = {"rows": dense}
    if int8:
        exact = np.asarray(dense)
        scales = np.maximum(np.abs(exact).max(-1), np.float32(1e-8)) / np.float32(127)
        quotient = np.rint(exact / scales[..., None])
        expected = {"rows": quotient.astype(np.int8), "scales": scales}
    if checkpoints == 1 and len(mask) == 3:
        expected = {name: value[0] for name, value in expected.items()}

    def result(out: Any) -> dict[str, Any]:
        stored = (pool[slots] for pool in out if pool is not None)
        named = zip(expected, stored, strict=True)
        return {name: value.reshape(expected[name].shape) for name, value in named}

    def run(call: Callable[..., Any], tolerance: float | None = None) -> Run:
        pools = tuple(None if x is None else x.copy() for x in (data["rows"], data["scales"]))
        rest = (data["temporal"], data["index"], slots, data["states"])
        step = jax.jit(call, donate_argnums=(0, 1))
        return Run(step, (*pools, *rest), 2 if int8 else 1, result, tolerance=tolerance)

    inputs = {"rows": data["temporal"][:, 0].reshape(-1, VALUE), "index": data["index"]}
    xla = partial(run, packing.pack, XLA_INT8_TOLERANCE if int8 else None)
    return Problem(inputs, expected, 0.0, _runs(hopper.pack, run, xla))


def _unpack(mask: tuple[int, ...], int8: bool, checkpoints: int) -> Problem:
    data = _data(mask, int8, checkpoints)
    slots, states, rows, scales = (data[x] for x in ("slots", "states", "rows", "scales"))
    dense = packing.spread(rows, scales, data["inverse"], slots, mask[0])
    expected = {"state": dense.reshape(mask[0], checkpoints, mask[1], VALUE, VALUE)}
    if checkpoints == 1 and len(mask) == 3:
        expected = {"state": dense.reshape(-1, VALUE)}

    def result(out: Any) -> dict[str, Any]:
        return {"state": out[0][:, states].reshape(expected["state"].shape)}

    def run(call: Callable[..., Any]) -> Run:
        step = jax.jit(lambda *args: (call(*args),), donate_argnums=0)
        rest = (rows, scales, data["inverse"], slots, states)
        return Run(step, (data["temporal"].copy(), *rest), 1, result)

    inputs = {"rows": rows[1], "index": data["index"], "units": len(data["inverse"])}
    if int8:
        inputs["scales"] = scales[1]
    return Problem(inputs, expected, 0.0, _runs(hopper.unpack, run, partial(run, packing.unpack)))


def _runs(
    kernel: Callable[..., Any], run: Callable[..., Run], xla: Callable[[], Run]
) -> dict[str, Callable[[], Run]]:
    variants = {f"ours[rows={b.rows}]": partial(run, partial(kernel, blocking=b)) for b in VARIANTS}
    return {"ours": partial(run, kernel), **variants, "xla": xla}
