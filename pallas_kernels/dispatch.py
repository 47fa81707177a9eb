"""Which implementation of an op runs: the one asked for, or the first that says it can."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

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


def anything(*args: Any) -> None:
    """The predicate of implementations that take all valid arguments."""
