"""Train a demo checkpoint: the same as `dasc train`."""

import sys

from dasc_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
