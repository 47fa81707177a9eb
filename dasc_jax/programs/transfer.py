"""Times a store and a load of state checkpoints over all devices, by placement and by how units
travel.

    python scripts/bench_transfer.py --out results/transfer.jsonl

Every call runs many times in one compiled loop, so that the host's launches are not counted. What
is timed has first given back what went in.
"""

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from dasc_jax.balance import Placement, place
from dasc_jax.checkpoint_shards import Shards, init_pool, keep_masks, load, restore, store
from dasc_jax.checkpoint_state import CheckpointPool
from dasc_jax.config import ModelConfig
from dasc_jax.layout import Quantization, account, unit_bytes
from dasc_jax.parallel import AXIS, STATE_SPEC, make_mesh
from dasc_jax.plan import SelectionPlan, make_plan
from dasc_jax.programs.runtime import FAILED, machine, settle
from dasc_jax.programs.step_profile import large_copies
from dasc_jax.published import published_profile
from dasc_jax.rank_slots import counts
from dasc_jax.types import RecurrentState
from dasc_jax.unit_exchange import FORMS, Form, cheapest, cost, exchange

SLOTS = 8
"""Of a pool and of the active states; a loop goes round them."""


@dataclass(frozen=True)
class Args:
    """What is timed."""

    model: str = "kimi-linear-48b"
    """A released configuration (`dasc_jax.published`), with its synthetic horizons."""
    windows: tuple[int, ...] = (16, 512)
    """Values of w_max."""
    placements: tuple[Placement, ...] = ("off", "storage", "hybrid")
    quantizations: tuple[str, ...] = ("none", "int8")
    """"none" or "int8"."""
    checkpoints: int = 1
    """Stored or loaded by one call."""
    ranks: int | None = None
    """Devices; None: all."""
    blocks: tuple[int, ...] = (1, 64, 1024, 16384)
    """Rows of 512 bytes that every rank sends to every other in an exchange alone."""
    steps: int = 100
    """Calls in a loop."""
    repeats: int = 7
    """Loops; the median is reported, and the least."""
    out: Path | None = None
    """A file that gets one JSON line a case."""


class Looped(NamedTuple):
    """Milliseconds of a step, and bytes of whole arrays that it copies beside its work."""

    median: float
    least: float
    copied: int


class WrongResult(Exception):
    """A load that did not give back what was stored."""


def loop(step: Callable[[Any, jax.Array], Any], carried: Any, args: Args) -> tuple[Looped, Any]:
    """Times `carried = step(carried, i)`; also the last `carried`. The first is donated."""
    whole = jax.jit(lambda x: lax.fori_loop(0, args.steps, lambda i, x: step(x, i), x),
                    donate_argnums=0)  # fmt: skip
    run = whole.lower(carried).compile()
    carried, spent = jax.block_until_ready(run(carried)), []
    for _ in range(args.repeats):
        start = time.perf_counter()
        carried = jax.block_until_ready(run(carried))
        spent.append(1e3 * (time.perf_counter() - start) / args.steps)
    copied = sum(large_copies(run.as_text() or "").values())
    return Looped(statistics.median(spent), min(spent), copied), carried


def random_state(mesh: Mesh, config: ModelConfig, states: int) -> RecurrentState:
    """States of so many requests, every part made on its own rank."""
    delta, layers = config.delta, len(config.recurrent_layers)
    shape = (layers, states, delta.num_value_heads, delta.key_dim, delta.value_dim)
    place = NamedSharding(mesh, STATE_SPEC)
    conv = jnp.ones((layers, states, delta.conv_channels, 3), config.dtype, device=place)
    return RecurrentState(_normal(shape, place), conv)


@partial(jax.jit, static_argnums=(0, 1))
def _normal(shape: tuple[int, ...], place: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(jax.random.normal(jax.random.key(0), shape), place)


def touched(temporal: jax.Array, mesh: Mesh) -> jax.Array:
    """A state that differs in one number: what depends on nothing new, XLA takes out of a loop."""
    return jax.shard_map(
        lambda x: x.at[0, 0, 0, 0, 0].add(1.0), mesh=mesh, in_specs=STATE_SPEC, out_specs=STATE_SPEC
    )(temporal)


def check(shards: Shards, pool: CheckpointPool, slots: jax.Array, state: RecurrentState) -> None:
    """Raises WrongResult unless the slots hold `state`, as exactly as the pool can."""
    temporal = np.asarray(jax.jit(load, static_argnums=0)(shards, pool, slots)[0])
    keep = keep_masks(shards, temporal.shape[3])[:, None, ..., None]
    expected = np.where(keep, np.asarray(state.temporal), np.float32(0))
    bound = np.float32(0)
    if pool.scales is not None:
        bound = np.abs(expected).max(-1, keepdims=True) * np.float32(0.51 / 127)
    if not (np.abs(temporal - expected) <= bound).all():
        raise WrongResult("a load does not give back what was stored")


def times(
    shards: Shards, config: ModelConfig, quantization: Quantization, args: Args
) -> dict[str, float]:
    """A store, and a load into active states.

    Raises:
        WrongResult: they are wrong.
    """
    count = args.checkpoints
    size = max(SLOTS, 2 * count) + 1
    state = random_state(shards.mesh, config, count)
    pool = init_pool(shards, config, size, quantization=quantization)

    def some(i: jax.Array) -> jax.Array:
        return 1 + (i * count + jnp.arange(count)) % (size - 1)

    def store_one(carried: Any, i: jax.Array) -> Any:
        pool, temporal = carried
        temporal = touched(temporal, shards.mesh)
        return store(shards, pool, some(i), temporal, state.conv), temporal

    def load_one(carried: Any, i: jax.Array) -> Any:
        active, pool = carried
        return restore(shards, active, pool, some(i), some(i + 1)), pool

    first = jnp.arange(1, count + 1)
    pool = jax.jit(store, static_argnums=0, donate_argnums=1)(shards, pool, first, *state)
    check(shards, pool, first, state)
    stored, (pool, _) = loop(store_one, (pool, jnp.copy(state.temporal)), args)
    loaded, _ = loop(load_one, (random_state(shards.mesh, config, size), pool), args)
    return {
        "store_ms": stored.median, "store_least_ms": stored.least,
        "load_ms": loaded.median, "load_least_ms": loaded.least,
        "copied": stored.copied + loaded.copied,
    }  # fmt: skip


def loop_case(config: ModelConfig, tp: int, args: Args) -> Iterator[dict[str, Any]]:
    """What of every `store_ms` is the loop's: one number of a state changes, nothing else."""
    mesh = make_mesh(tp)

    def measure() -> dict[str, float]:
        state = random_state(mesh, config, args.checkpoints)
        took, _ = loop(lambda x, i: touched(x, mesh), state.temporal, args)
        return {"ms": took.median, "least_ms": took.least}

    yield {"op": "loop"} | attempt(measure)


def checkpoint_cases(
    config: ModelConfig, plan: SelectionPlan, tp: int, args: Args
) -> Iterator[dict[str, Any]]:
    """One line for every placement, quantization and form of travelling."""
    for placement in args.placements:
        storage = place(plan, config, tp, placement)
        moves = counts(storage)
        for name in args.quantizations:
            quantization: Quantization = "int8" if name == "int8" else None
            size = unit_bytes(config, quantization) * args.checkpoints
            best = cheapest(moves, size)
            for form in FORMS if storage.moved else (None,):
                expected = cost(moves, size, form or best)
                line = {
                    "op": "checkpoint", "w_max": plan.w_max, "placement": placement,
                    "quantization": name, "form": form, "chosen": form in (None, best),
                    "checkpoints": args.checkpoints, "width": storage.width,
                    "moved": storage.moved, "collectives": expected.collectives,
                    "busiest_rank_bytes": expected.bytes,
                    "estimated_ms": 1e3 * expected.seconds,
                    "slot_bytes": account(config, plan, tp, placement, quantization).bytes_per_slot,
                }  # fmt: skip
                shards = Shards(plan, storage, make_mesh(tp), form)
                yield line | attempt(lambda s=shards, q=quantization: times(s, config, q, args))


def exchange_cases(tp: int, args: Args) -> Iterator[dict[str, Any]]:
    """One line for every form and size: every rank sends as many rows to every other."""
    mesh = make_mesh(tp)
    for rows in args.blocks:
        moves = rows * (1 - np.eye(tp, dtype=np.int64))
        for form in FORMS:

            def all_exchange(blocks: jax.Array, i: jax.Array, form: Form = form) -> jax.Array:
                return jax.shard_map(
                    lambda x: exchange(x[0], moves, AXIS, form)[None],  # noqa: B023
                    mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS),
                    check_vma=False,
                )(blocks)  # fmt: skip

            def measure(step: Any = all_exchange, rows: int = rows) -> dict[str, float]:
                place = NamedSharding(mesh, PartitionSpec(AXIS))
                blocks = jnp.ones((tp, tp, rows, 128), jnp.float32, device=place)
                took, _ = loop(step, blocks, args)
                return {"ms": took.median, "least_ms": took.least}

            expected = cost(moves, 512, form)
            yield {
                "op": "exchange", "form": form, "rows": rows,
                "collectives": expected.collectives, "busiest_rank_bytes": expected.bytes,
                "estimated_ms": 1e3 * expected.seconds,
            } | attempt(measure)  # fmt: skip


def attempt(measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """The figures, or under "error" why there are none: the next case has its turn."""
    try:
        return measure()
    except (jax.errors.JaxRuntimeError, NotImplementedError, WrongResult) as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def cases(args: Args) -> Iterator[dict[str, Any]]:
    """All lines.

    Raises:
        ValueError: an unknown model. ConfigError: more ranks than devices, or they do not divide.
    """
    tp = args.ranks or jax.device_count()
    config, h = published_profile(args.model)
    yield from loop_case(config, tp, args)
    yield from exchange_cases(tp, args)
    for w_max in args.windows:
        yield from checkpoint_cases(config, make_plan(h, w_max), tp, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (default: the command line); returns the exit code."""
    args = tyro.cli(Args, args=argv)
    settle()
    console, begun, failed = Console(width=150), time.perf_counter(), False
    command = "scripts/bench_transfer.py " + shlex.join(sys.argv[1:] if argv is None else argv)
    where = {
        "model": args.model, "ranks": args.ranks or jax.device_count(), "device": machine(),
        "date": date.today().isoformat(), "command": command.strip(),
    }  # fmt: skip
    console.print(f"{where['model']} over {where['ranks']} ranks; {where['device']}")
    for line in cases(args):
        failed |= "error" in line
        console.print(f"{time.perf_counter() - begun:6.1f} s  {shown(line)}", highlight=False)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(line | where) + "\n")
    return FAILED if failed else 0


def shown(line: dict[str, Any]) -> str:
    """A line for people."""
    if line["op"] == "loop":
        case = "the loop alone"
    elif line["op"] == "exchange":
        case = f"exchange {line['form']}, {line['rows']} rows a pair"
    else:
        travel = f"{line['moved']} move by {line['form']}" if line["moved"] else "nothing moves"
        mark = " (chosen)" if line["moved"] and line["chosen"] else ""
        case = f"w_max {line['w_max']} {line['placement']} {line['quantization']}: {travel}{mark}"
    if "error" in line:
        return f"{case}: {line['error']}"
    figures = [f"{name} {line[name]:.4f}" for name in line if name.endswith("ms")]
    return f"{case}: " + ", ".join(figures)


if __name__ == "__main__":
    sys.exit(main())
