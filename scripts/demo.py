"""The demo of the README: the same as `dasc demo`."""

import sys

from dasc_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
