"""Measure the quality of compressed checkpoints as the DASC paper does; see --help."""

import sys

from dasc_jax.evals.quality.program import main

if __name__ == "__main__":
    sys.exit(main())
