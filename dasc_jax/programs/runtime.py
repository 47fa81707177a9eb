"""What every program settles before it touches a device, and how it says what is wrong."""

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console

EMBEDDED = Path(__file__).resolve().parents[2] / "checkpoints" / "kimi-linear-mini"
"""The checkpoint that programs take by default: it comes with the repository."""

FAILED = 1
"""Exit status of a program that could not do its work; usage errors exit with 2."""


class ProgramError(Exception):
    """The program has said what is wrong, and ends."""


def settle(compilation_cache: str = "auto", mem_fraction: float | None = None) -> Path | None:
    """Set what JAX reads when its first device is used; call it before that.

    Args:
        compilation_cache: a directory for compiled steps; "auto" takes the one JAX is configured
            with, else one under ~/.cache; "off" keeps none.
        mem_fraction: share of a GPU's memory that JAX reserves at its start.

    Returns:
        The directory of compiled steps, None when there is none.

    Raises:
        ValueError: a fraction outside (0, 1]. OSError: a directory that cannot be made.
    """
    if mem_fraction is not None:
        if not 0.0 < mem_fraction <= 1.0:
            raise ValueError(f"mem-fraction is {mem_fraction}; it must lie in (0, 1]")
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(mem_fraction)
    # XLA solves small triangular systems on a CPU with OpenBLAS, whose threads would take longer to
    # wake than to solve them; it reads this once SciPy is loaded, at the first such system.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # transformers, of which only tokenizers are used, would advise to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if compilation_cache == "off":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    configured = jax.config.jax_compilation_cache_dir
    if compilation_cache == "auto" and configured:
        return Path(configured)
    root = default_cache() if compilation_cache == "auto" else Path(compilation_cache).expanduser()
    folder = root / processor()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def default_cache() -> Path:
    """Where compiled steps are kept unless the user says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dasc_jax" / "compiled"


def processor() -> str:
    """A short name of this processor: code that XLA compiled for one may not run on another."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    kinds = ("flags", "Features", "model name")
    traits = sorted({line for line in lines if line.startswith(kinds)}) or lines
    return hashlib.sha256("\n".join(traits).encode()).hexdigest()[:12]


def machine() -> str:
    """What a measurement was made on, in words: processor, cores, device, jax version."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    device = jax.devices()[0]
    name = names[0] if names else platform.processor() or platform.machine()
    shown = "" if device.platform == "cpu" else f", {device.device_kind}"
    return f"{name}, {os.cpu_count()} cores{shown}, jax {jax.__version__}"


@contextlib.contextmanager
def complaints() -> Iterator[None]:
    """Turn what a user can put right into one `error:` line on stderr and a ProgramError."""
    try:
        yield
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        complain(str(error))
        raise ProgramError from error


def complain(message: str, kind: str = "error") -> None:
    """A line on stderr."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"{kind}: {message}", markup=False, highlight=False)
