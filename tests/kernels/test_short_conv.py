"""The short convolution: one answer however a sequence is cut, packed or stepped."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.kernels import cases

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "ops_misc.npz")
CHANNELS, TOKENS = 10, 96

every_impl = pytest.mark.parametrize("impl", cases.IMPLS)
every_dtype = pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"]
)


@functools.partial(jax.jit, static_argnames="impl")
def convolve(u, weight, window, cu_seqlens, *, impl):
    """y and the window after every segment."""
    y = pk.short_conv(u, weight, window, cu_seqlens, impl=impl)
    segments = jnp.arange(window.shape[0], dtype=jnp.int32)
    return y, pk.conv_windows(u, window, cu_seqlens, segments, cu_seqlens[1:])


def in_bucket(impl, u, weight, window, lengths):
    """y of the real tokens and the windows after, computed in a bucket padded with NaN."""
    padded = np.full((TOKENS, CHANNELS), np.nan, u.dtype)
    padded[: len(u)] = u
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    y, after = (np.asarray(x) for x in convolve(padded, weight, window, cu, impl=impl))
    assert not y[len(u) :].any()
    return y[: len(u)], after


def random_case(seed, tokens, segments, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = ((tokens, CHANNELS), (CHANNELS, 4), (segments, CHANNELS, 3))
    return (np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for shape in shapes)


@every_impl
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_golden_convolutions_with_a_carried_window(length, impl):
    u, weight, window, y, after = (
        GOLDEN[f"conv{length}/{name}"]
        for name in ("x", "weight", "initial_window", "y", "final_window")
    )
    cu = np.arange(3, dtype=np.int32) * length
    out, moved = convolve(u.reshape(-1, CHANNELS), weight[:, 0], window, cu, impl=impl)
    np.testing.assert_allclose(out, y.reshape(-1, CHANNELS), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(moved, after.astype(np.float32))


@every_impl
@every_dtype
def test_a_cut_anywhere_changes_no_bit(impl, dtype):
    u, weight, window = random_case(0, 70, 1, dtype)
    whole, after = in_bucket(impl, u, weight, window, [70])
    for at in range(1, 70):
        head, middle = in_bucket(impl, u[:at], weight, window, [at])
        tail, end = in_bucket(impl, u[at:], weight, middle, [70 - at])
        cases.assert_same_bits(np.concatenate([head, tail]), whole)
        cases.assert_same_bits(end, after)


@every_impl
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_chunks_shorter_than_the_kernel_change_no_bit(impl, size):
    u, weight, window = random_case(1, 70, 1)
    whole, after = in_bucket(impl, u, weight, window, [70])
    pieces = []
    for first in range(0, 70, size):
        piece = u[first : first + size]
        y, window = in_bucket(impl, piece, weight, window, [len(piece)])
        pieces.append(y)
    cases.assert_same_bits(np.concatenate(pieces), whole)
    cases.assert_same_bits(window, after)


@every_dtype
def test_single_steps_equal_the_packed_convolution(dtype):
    u, weight, window = random_case(2, 70, 1, dtype)
    whole, after = in_bucket("reference", u, weight, window, [70])
    step, following = jax.jit(pk.short_conv_step), jax.jit(pk.next_windows)
    rows = []
    for token in range(70):
        rows.append(np.asarray(step(u[token : token + 1], weight, window)))
        window = following(u[token : token + 1], window)
    tolerance = 1e-6 if dtype == jnp.float32 else 1e-2
    assert cases.distance(np.concatenate(rows), np.asarray(whole, np.float64)) <= tolerance
    cases.assert_same_bits(window, after)


@every_impl
@every_dtype
def test_packed_sequences_do_not_see_each_other_or_the_padding(impl, dtype):
    lengths = [0, 5, 0, 64, 1, 0]
    u, weight, window = random_case(3, 70, len(lengths), dtype)
    packed, after = in_bucket(impl, u, weight, window, lengths)
    ends = np.cumsum(lengths)
    for index, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        own = np.zeros_like(window)
        own[0] = window[index]
        alone, moved = in_bucket(impl, u[end - length : end], weight, own, [length, *[0] * 5])
        cases.assert_same_bits(alone, packed[end - length : end])
        cases.assert_same_bits(moved[0], after[index])
        if length == 0:
            cases.assert_same_bits(after[index], window[index])


def test_windows_inside_a_segment_are_the_inputs_just_before():
    u, _, window = random_case(4, 70, 2)
    cu = jnp.array([0, 6, 70], jnp.int32)
    segment = jnp.array([0, 1, 1, 1, 1], jnp.int32)
    end = jnp.array([6, 6, 7, 8, 70], jnp.int32)
    windows = np.asarray(pk.conv_windows(jnp.asarray(u), jnp.asarray(window), cu, segment, end))
    history = [np.concatenate([window[0].T, u[:6]]), np.concatenate([window[1].T, u[6:]])]
    for row, (s, e) in enumerate(zip(segment.tolist(), end.tolist(), strict=True)):
        taken = e - int(cu[s])
        cases.assert_same_bits(windows[row], history[s][taken : taken + 3].T)
