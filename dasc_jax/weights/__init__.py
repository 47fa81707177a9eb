"""Checkpoints on disk to parameters on devices, and back; see `restore`, `native`, `convert`,
`names`, `permute`."""

from dasc_jax.weights.audit import Manifest, WeightError, audit
from dasc_jax.weights.native import save_native
from dasc_jax.weights.restore import load_params
from dasc_jax.weights.specs import param_specs

__all__ = ["Manifest", "WeightError", "audit", "load_params", "param_specs", "save_native"]
