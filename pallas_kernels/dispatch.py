"""Which implementation of an op runs: the one asked for, or the first that says it can."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

IMPLEMENTATIONS = ("auto", "mosaic", "xla", "reference")


class Implementation(NamedTuple):
    """One way to compute an op. `refuses(*args)` returns why it cannot take these arguments, or
    None.

    It is the implementation's own list of what it was built and tested for, so what it does not
    know it refuses. `run(*args)` is called with exactly the arguments that it accepted.
    """

    name: str
    refuses: Callable[..., str | None]
    run: Callable[..., Any]


class Op(NamedTuple):
    """An op and its implementations, the preferred one first."""

    name: str
    implementations: tuple[Implementation, ...]

    def __call__(self, impl: str, *args: Any) -> Any:
        """Run with `impl`, one of `IMPLEMENTATIONS`; `"auto"` takes the first that does not refuse.

        Raises:
            ValueError: no implementation has that name.
            RuntimeError: `"mosaic"` without an NVIDIA GPU.
            NotImplementedError: the op has no such implementation, or it refuses these arguments.
        """
        if impl not in IMPLEMENTATIONS:
            raise ValueError(
                f"{self.name}: unknown impl {impl!r}; one of {', '.join(IMPLEMENTATIONS)}"
            )
        if impl == "mosaic" and jax.default_backend() != "gpu":
            raise RuntimeError(
                f"{self.name}: impl='mosaic' needs an NVIDIA GPU; "
                f"JAX runs on {jax.default_backend()}"
            )
        reasons = []
        for one in self.implementations:
            if impl in ("auto", one.name):
                reason = one.refuses(*args)
                if reason is None:
                    return one.run(*args)
                reasons.append(f"{one.name}: {reason}")
        present = ", ".join(one.name for one in self.implementations)
        why = "; ".join(reasons) or f"it has no {impl} kernel, only {present}"
        raise NotImplementedError(f"{self.name}: impl={impl!r} cannot run this: {why}")


def traced_once(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, of which all calls with the same shapes inside one program are one function.

    A kernel takes about a second to trace and lower, and the layers of a model call it with the
    same shapes. An array that is given twice stays one array; whatever is no array, as a layer's
    number, must be hashable, and calls that differ in it are apart.
    """

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        arrays = {id(x): x for x in leaves if isinstance(x, jax.Array | np.ndarray)}
        rows = {key: row for row, key in enumerate(arrays)}
        places = tuple(rows[id(x)] if id(x) in rows else _Static(type(x), x) for x in leaves)
        return _compiled(run, tree, places)(*arrays.values())

    return call


class _Static(NamedTuple):
    """What is no array; its type keeps 1, 1.0 and True apart, which are equal."""

    kind: type
    value: Hashable


@lru_cache(maxsize=1024)
def _compiled(
    run: Callable[..., Any], tree: Any, places: tuple[int | _Static, ...]
) -> Callable[..., Any]:
    def call(*arrays: jax.Array) -> Any:
        leaves = [at.value if isinstance(at, _Static) else arrays[at] for at in places]
        return run(*jax.tree.unflatten(tree, leaves))

    return jax.jit(call)


def anything(*args: Any) -> None:
    """The predicate of implementations that take all valid arguments."""
