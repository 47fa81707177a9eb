"""The shape legend of the project, and the two device states every request has.

| letter | meaning | letter | meaning |
| --- | --- | --- | --- |
| `B` | requests in a batch | `L` | recurrent (linear-attention) layers |
| `T` | packed tokens | `F` | attention layers |
| `N` | segments of a packed batch | `H` | value heads (`Hk`: key heads) |
| `S` | slots of a pool (slot 0 is the padding sink) | `K`, `V` | key and value dims of a head |
| `P` | attention pages (page 0 is the padding sink) | `C` | channels of the short convolution |
| `U` | state units, `R` of them retained | `D` | width of the residual stream |

A *unit* is what one decay governs: a head (GDN) or a (head, key channel) pair (KDA).
The temporal state is stored k-major, `[H, K, V]`, so that a KDA unit is one contiguous row.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Float32

AnyArray = Array | np.ndarray
"""Of a batch: made in numpy on the host, an array of JAX inside the step that is jitted over it."""

PAGE = 64
"""Tokens of an attention page; also the grid of state checkpoints and of the chunked kernels."""


class RecurrentState(NamedTuple):
    """The state of all recurrent layers, one row a slot (or a request, where nothing is pooled).

    `temporal[l, s, h, k]` is the V-vector of unit (h, k); `conv[l, s, c]` holds the last three
    inputs of the short convolution before its activation, oldest first, in the model's dtype.
    """

    temporal: Float32[Array, "L S H K V"]
    conv: Float[Array, "L S C 3"]


class AttentionPages(NamedTuple):
    """The paged cache of all attention layers, 64 tokens a page.

    MLA keeps one array `[F, P, 64, latent + shared]`; grouped-query attention keeps keys and
    values, each `[F, P, 64, Hkv, D]`. Nothing here knows which: the attention layers do.
    """

    arrays: tuple[jax.Array, ...]
