"""What every test shares: platform, compilation cache, fixtures on disk, search profiles."""

import gc
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("local", deadline=None, max_examples=50)
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=50, derandomize=True, database=None
)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=500)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


QUICK_COMPILATION = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
"""Most of the time goes to compiling, and this takes a third of it; tiny models run no slower.

A run that includes the slow tests, as `make nightly` does, compiles as a server on a CPU would.
"""


def pytest_configure(config: pytest.Config) -> None:
    """Choose the platform before a test module imports jax, and keep compiled programs.

    Device tests name `cuda` outright: a machine without a GPU fails instead of testing the CPU.
    """
    marks = config.option.markexpr
    device_tests = "device" in marks and "not device" not in marks
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if device_tests else "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache" / _processor()))
    # The interpreter of GPU kernels runs each thread of a block on one of the CPU client's, and
    # waits for ever where a block has more threads than a small machine gives it.
    os.environ.setdefault("NPROC", "8")
    # OpenBLAS solves the triangular systems of a chunk on a CPU. They are so small that waking its
    # threads takes many times what the sums do, the more so where every core is at work already.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "not slow" in marks:
        os.environ.setdefault("XLA_FLAGS", QUICK_COMPILATION)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _processor() -> str:
    """A short name of this processor: code that XLA compiled for one may not run on another."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    kinds = ("flags", "Features", "model name")
    traits = sorted({line for line in lines if line.startswith(kinds)})
    return hashlib.sha256("\n".join(traits).encode()).hexdigest()[:12]


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The reference results and tiny checkpoints; the README beside them says how to read them."""
    return ROOT / "tests" / "golden"


@pytest.fixture(params=["kimi_linear_a", "qwen3_next_a"])
def released(request: pytest.FixtureRequest, golden_dir: Path) -> Path:
    """A tiny checkpoint of each family, laid out like a released one."""
    return golden_dir / request.param


MOST_MAPPINGS = 30_000
"""Half of the kernel's default limit for a process (vm.max_map_count, 65,530)."""


@pytest.fixture(autouse=True)
def few_mappings() -> Iterator[None]:
    """Let go of engines where a module builds very many.

    XLA maps memory for every program it compiles on the CPU; past the kernel's limit the next
    compilation crashes the process. JAX's own caches stay: an engine that is still in use would
    compile again, which it must not.
    """
    yield
    if _mappings() > MOST_MAPPINGS:
        _forget_engines()


@pytest.fixture(scope="module", autouse=True)
def release_compiled_programs() -> Iterator[None]:
    """Drop every compiled program behind each module; see `few_mappings`."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    _forget_engines()


def _mappings() -> int:
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


def _forget_engines() -> None:
    for name in ("tests.engines", "tests.mesh_engines"):
        if name in sys.modules:
            sys.modules[name].forget()
    gc.collect()
