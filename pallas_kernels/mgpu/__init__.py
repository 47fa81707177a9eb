"""Pallas Mosaic GPU kernels for Hopper, one a file. Only their callers in `ops` import them."""
