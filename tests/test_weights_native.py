import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from dasc_jax.config import ModelConfig
from dasc_jax.parallel import param_spec
from dasc_jax.tokenizer import tokenizer_files, write_byte_tokenizer
from dasc_jax.weights import WeightError, load_params, save_native
from dasc_jax.weights.convert import main as convert
from dasc_jax.weights.names import pieces
from dasc_jax.weights.native import _groups
from dasc_jax.weights.permute import Placement
from dasc_jax.weights.specs import param_specs
from tests.checkpoints import FAMILIES, ROOT, assert_same, load, rewritten, tensors_of


def test_a_native_directory_returns_every_bit(released, tmp_path):
    write_byte_tokenizer(tmp_path / "tokenizer")
    config = ModelConfig.from_hf(released)
    params = load(released, config.dtype)
    native = tmp_path / "native"
    save_native(native, config, params, tokenizer_files(tmp_path / "tokenizer"))
    assert ModelConfig.from_hf(native) == config
    assert_same(load(native, config.dtype), params)
    assert [file.name for file in tokenizer_files(native)] == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert_same(load(native, "bfloat16"), load(released, "bfloat16"))
    with pytest.raises(FileExistsError):
        save_native(native, config, params)


def test_rows_change_places_in_the_order_of_the_parameters(released, tmp_path, monkeypatch):
    """Processes that load together place each parameter together."""
    config, placed = ModelConfig.from_hf(released), []
    save_native(tmp_path / "native", config, load(released))
    place = Placement.place

    def noted(self, path, value):
        placed.append(path)
        return place(self, path, value)

    monkeypatch.setattr(Placement, "place", noted)
    orders = [np.arange(config.delta.num_key_heads)[::-1]] * len(config.recurrent_layers)
    loaded = load_params(tmp_path / "native", config, "float32", orders=orders)
    groups = _groups(param_specs(config, "float32"))
    assert len(placed) > 8 and set(placed) < loaded.keys()
    assert placed == [name for group in groups for name in group if name in placed]


def test_a_native_directory_of_another_config_is_refused(released, tmp_path):
    config = ModelConfig.from_hf(released)
    params = load(released)
    del params["norm.weight"]
    with pytest.raises(WeightError, match=r"missing \(1\): norm.weight"):
        save_native(tmp_path / "incomplete", config, params)
    assert not (tmp_path / "incomplete").exists()
    save_native(tmp_path / "whole", config, load(released))
    wider = dataclasses.replace(config, vocab_size=512)
    with pytest.raises(WeightError, match=r"embed.weight \[256, 64\] instead of \[512, 64\]"):
        load_params(tmp_path / "whole", wider, "float32")


@pytest.mark.parametrize("native", [False, True])
def test_parameters_land_on_the_shardings_asked_for(released, tmp_path, native):
    path = released
    if native:
        path = tmp_path / "native"
        save_native(path, ModelConfig.from_hf(released), load(released))
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    split = NamedSharding(mesh, PartitionSpec("tp"))
    params = load(path, shardings=lambda name: split)
    assert all(value.sharding == split for value in params.values())
    on_ranks = load(path, mesh=mesh)
    assert all(
        value.sharding == NamedSharding(mesh, param_spec(name)) for name, value in on_ranks.items()
    )
    assert_same(params, on_ranks)


SPREAD = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dasc_jax.config import ModelConfig
from dasc_jax.weights import load_params, save_native

source, native = sys.argv[1:]
config = ModelConfig.from_hf(source)
mesh = Mesh(np.array(jax.devices()), ("tp",))
assert mesh.size == 4
whole = load_params(source, config, "float32")

def sharding(name):
    spec = PartitionSpec("tp") if ".experts." in name else PartitionSpec()
    return NamedSharding(mesh, PartitionSpec(None, "tp") if "q_proj" in name else spec)

save_native(native, config, load_params(source, config, "float32", shardings=sharding))
for path in (source, native):
    for name, value in load_params(path, config, "float32", shardings=sharding).items():
        assert value.sharding == sharding(name), name
        np.testing.assert_array_equal(np.asarray(value), np.asarray(whole[name]), name)
"""


def test_every_rank_gets_its_own_part(released, tmp_path):
    command = [sys.executable, "-c", SPREAD, str(released), str(tmp_path / "native")]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_convert_writes_what_loading_gives(released, tmp_path, capsys):
    tensors = tensors_of(released) | {"mtp.fc.weight": np.ones(8, np.float32)}
    source = rewritten(released, tmp_path / "hf", tensors)
    write_byte_tokenizer(source)
    target = tmp_path / "native"
    assert convert([str(source), str(target), "--dtype", "bfloat16"]) == 0
    assert "mtp.fc.weight" in capsys.readouterr().out
    config = ModelConfig.from_hf(target)
    assert config == dataclasses.replace(ModelConfig.from_hf(source), dtype="bfloat16")
    assert_same(load(target, "bfloat16"), load(source, "bfloat16"))
    assert (target / "tokenizer.json").is_file()
    assert convert([str(source), str(target)]) == 1
    assert "holds a checkpoint already" in capsys.readouterr().err


def test_convert_of_a_damaged_checkpoint_fails_and_writes_nothing(released, tmp_path, capsys):
    tensors = tensors_of(released)
    tensors["model.stray.weight"] = tensors.pop("model.norm.weight")
    source = rewritten(released, tmp_path / "hf", tensors)
    assert convert([str(source), str(tmp_path / "native")]) == 1
    errors = capsys.readouterr().err
    assert "model.norm.weight" in errors and "model.stray.weight" in errors
    assert not (tmp_path / "native").exists()


def big_checkpoint(path: Path, source: Path) -> int:
    """A random bfloat16 Kimi-like checkpoint of about 260 MB; its largest tensor has 64 MiB."""
    values = json.loads((source / "config.json").read_text())
    values |= {"hidden_size": 512, "vocab_size": 65536, "intermediate_size": 1024}
    values |= {"num_experts": 32, "moe_intermediate_size": 256, "dtype": "bfloat16"}
    config = ModelConfig.from_dict(values)
    rng = np.random.default_rng(0)
    shapes = {piece.tensor: piece.shapes[0] for piece in pieces(config, ())}
    tensors = {
        name: rng.integers(0, 2**14, shape, np.uint16).view(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(values))
    return max(tensor.nbytes for tensor in tensors.values())


# A first load starts every thread and library that loading needs; what is measured is the highest
# memory since, above what is held then. (Not ru_maxrss: a child inherits its parent's.)
MEASURE = """
import sys
from pathlib import Path
from dasc_jax.config import ModelConfig
from dasc_jax.weights import load_params
from dasc_jax.weights.convert import main as convert

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def load(path):
    params = load_params(path, ModelConfig.from_hf(path), "bfloat16")
    return sum(value.nbytes for value in params.values())

small, big, target, what = sys.argv[1:]
if what == "load":
    load(small)
    before = memory("VmRSS:")
    model = load(big)
else:
    assert convert([small, target + "-small"]) == 0
    before = memory("VmRSS:")
    assert convert([big, target]) == 0
    model = Path(big, "model.safetensors").stat().st_size
print(memory("VmHWM:") - before, model)
"""


def measured_growth(small: Path, big: Path, target: Path, what: str) -> tuple[int, int]:
    command = [sys.executable, "-c", MEASURE, str(small), str(big), str(target), what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    growth, model = done.stdout.split()[-2:]
    return int(growth), int(model)


def test_loading_needs_the_model_and_one_and_a_half_tensors_of_memory(golden_dir, tmp_path):
    """Released: counted in tensors of the file. Native: in parameters, the largest of which is the
    embedding (64 MiB) here, though an expert stack in the released models."""
    largest = big_checkpoint(tmp_path, golden_dir / FAMILIES[0])
    small, native = golden_dir / FAMILIES[0], tmp_path / "native"
    growth, model = measured_growth(small, tmp_path, native, "load")
    assert growth <= model + 1.5 * largest, (growth, model, largest)
    growth, model = measured_growth(small, tmp_path, native, "convert")
    assert growth <= model + 1.5 * largest, (growth, model, largest)
    small = tmp_path / "native-small"
    growth, model = measured_growth(small, native, native, "load")
    assert growth <= model + 1.5 * largest, (growth, model, largest)
