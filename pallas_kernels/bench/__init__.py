"""Benchmarks of the kernels, one file a kernel: `cases()` yields what to time."""
