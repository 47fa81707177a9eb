"""From a checkpoint directory to an engine, with what it will cost shown before it is paid."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from dasc_jax.analysis.profile import load_profile
from dasc_jax.config import ModelConfig
from dasc_jax.engine.config import EngineConfig
from dasc_jax.engine.engine import Engine
from dasc_jax.engine.loop import checkpoint_slots
from dasc_jax.engine.peers import Followers
from dasc_jax.layout import Account, account
from dasc_jax.model import Model, init_recurrent
from dasc_jax.models import init_pages
from dasc_jax.parallel import local_config, rank_count
from dasc_jax.plan import SelectionPlan, make_plan
from dasc_jax.programs.runtime import complain
from dasc_jax.tokenizer import TokenizerError, load_tokenizer
from dasc_jax.types import PAGE
from dasc_jax.weights import load_params


class Forecast(NamedTuple):
    """What an engine will keep and how many bytes it takes of a rank, from the decay parameters
    alone."""

    model: ModelConfig
    plan: SelectionPlan
    ranks: int
    checkpoint: Account
    slots: int
    pages_bytes: int
    active_bytes: int


def model_config(path: Path) -> ModelConfig:
    """The configuration of a checkpoint directory.

    Raises:
        FileNotFoundError, ConfigError: there is none, or it cannot be honoured.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; a checkpoint is one with config.json")
    return ModelConfig.from_hf(path)


def forecast(path: Path, dtype: str, config: EngineConfig, mesh: Mesh | None = None) -> Forecast:
    """Plan an engine; reads decay parameters only and allocates nothing.

    Raises:
        OSError, ValueError: a checkpoint or sizes that cannot be served, with the numbers.
    """
    dasc, ranks = config.dasc, rank_count(mesh)
    model, horizons = load_profile(path, a=dasc.a, eps=dasc.eps)
    model = replace(model, dtype=dtype)
    plan = make_plan(horizons, config.w_max, eps=dasc.eps, a=dasc.a)
    config.check_model(model, plan.window)
    slots = checkpoint_slots(Model(model, {}, None, dtype, mesh), config, plan)
    own = local_config(model, ranks)
    pages = jax.eval_shape(lambda: init_pages(own, config.num_pages, jnp.dtype(dtype)))
    active = jax.eval_shape(lambda: init_recurrent(own, config.max_running + 1, dtype))
    cost = account(model, plan, ranks, dasc.placement, dasc.quantization)
    return Forecast(model, plan, ranks, cost, slots, _bytes(pages), _bytes(active))


def _bytes(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def forecast_table(ahead: Forecast, config: EngineConfig) -> Table:
    """The forecast as lines for a reader who is about to wait."""
    model, plan, cost = ahead.model, ahead.plan, ahead.checkpoint
    unit = "key channels" if plan.kind == "kda" else "heads"
    stored = config.dasc.quantization or "float32"
    kept = f"{plan.total:,} of {plan.units:,} units ({unit}), {100 * plan.total / plan.units:.1f} %"
    smaller = f"{cost.dense_bytes_per_slot / cost.bytes_per_slot:.2f}x smaller than dense"
    lines = {
        "model": f"{model.family}, {model.num_layers} layers of which {plan.layers} recurrent"
        f" ({plan.kind.upper()}), {model.dtype}",
        "kept": f"{kept}: they remember more than W_max = {plan.w_max} tokens",
        "policy": f"{config.dasc.policy}; refresh window {plan.window} tokens",
        "a checkpoint": f"{cost.bytes_per_slot:,} bytes ({stored} rows), {smaller}",
        "checkpoint pool": f"{ahead.slots:,} slots and the sink,"
        f" {(max(ahead.slots, 1) + 1) * cost.bytes_per_slot:,} bytes",
        "attention pages": f"{config.num_pages:,} of {PAGE} tokens, {ahead.pages_bytes:,} bytes",
        "running states": f"{config.max_running}, {ahead.active_bytes:,} bytes",
        "context": f"{config.max_context:,} tokens a request, prompt and output together",
        "prefix cache": f"minimum reusable prefix = {PAGE} tokens",
    }
    if ahead.ranks > 1:
        lines["ranks"] = f"{ahead.ranks}, placement {config.dasc.placement}; bytes are of a rank"
    table = Table(box=box.SIMPLE_HEAD, show_header=False, show_edge=False, pad_edge=False)
    for name, text in lines.items():
        table.add_row(name, text)
    return table


def load(path: Path, dtype: str, console: Console, mesh: Mesh | None = None) -> Model:
    """Load weights and tokenizer, showing the bytes read; a tokenizer that cannot be read is named
    and done without. The weights are cut over the axis `tp` of a mesh.

    Raises:
        OSError, ValueError: what is missing or unsupported.
    """
    config = model_config(path)
    total = sum(file.stat().st_size for file in path.glob("*.safetensors")) or None
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("loading weights", total=total)
        params = load_params(
            path, config, dtype, mesh, on_bytes=lambda read: bar.update(task, advance=read)
        )
        size = sum(value.nbytes for value in params.values())
        bar.update(task, total=total or size, completed=total or size)
    try:
        tokenizer = load_tokenizer(path)
    except TokenizerError as error:
        complain(f"{error}; prompts must be token ids", "warning")
        tokenizer = None
    return Model(config, params, tokenizer, dtype, mesh)


def build(
    model: Model,
    config: EngineConfig,
    console: Console,
    title: str = "compiling",
    followers: Followers | None = None,
) -> Engine:
    """An engine with every step compiled, showing how many are done.

    Raises:
        ValueError: sizes that do not fit together. JaxRuntimeError: not enough device memory.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)
        return Engine(
            model,
            config,
            lambda done, total: bar.update(task, completed=done, total=total),
            followers,
        )


def compile_table(engine: Engine) -> Table:
    """Seconds that every step took to compile, or to come from the compilation cache."""
    table = Table(title="compiled steps", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("step")
    for name in ("size", "seconds"):
        table.add_column(name, justify="right")
    seconds = engine.loop.device.executables.seconds
    for (step, bucket), spent in sorted(
        seconds.items(), key=lambda item: (item[0][0], _size(item[0][1]))
    ):
        table.add_row(step, f"{_size(bucket):,}", f"{spent:.1f}")
    return table


def _size(bucket: object) -> int:
    """Tokens of a prefill bucket, requests of the others."""
    return bucket if isinstance(bucket, int) else bucket.tokens  # type: ignore[attr-defined]
