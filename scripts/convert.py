"""Convert a released checkpoint to a native Orbax directory: the same as `dasc convert`."""

import sys

from dasc_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
