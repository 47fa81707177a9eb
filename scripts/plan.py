"""Print horizons, plan and checkpoint bytes of a model: the same as `dasc plan`."""

import sys

from dasc_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
