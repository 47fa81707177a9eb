"""Tests that need several devices, in a process of their own whose CPU is that many."""

import os
import subprocess
import sys

import jax
import pytest

from tests.checkpoints import ROOT
from tests.many_devices import DEVICES, FORCED

MODULES = [
    "test_parallel_model",
    "test_parallel_engine",
    "test_checkpoint_shards",
    "test_unit_exchange",
    "test_transfer",
]
DAY = "not slow and not device"


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="they run where they stand")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", MODULES)
def test_modules_that_need_devices_pass(module, pytestconfig):
    """What is chosen there, and how thoroughly, is what was chosen here."""
    chosen = ["-m", pytestconfig.option.markexpr or DAY]
    if profile := pytestconfig.getoption("--hypothesis-profile"):
        chosen.append(f"--hypothesis-profile={profile}")
    command = [sys.executable, "-m", "pytest", f"tests/{module}.py", "-q", "--no-header", *chosen]
    environment = os.environ | {"XLA_FLAGS": FORCED, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
