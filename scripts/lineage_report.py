"""Measure how answers drift over turns that reuse lossy checkpoints; see --help."""

import sys

from dasc_jax.analysis.lineage import main

if __name__ == "__main__":
    sys.exit(main())
