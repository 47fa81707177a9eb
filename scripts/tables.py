"""Make Table 1 and figures 2, 4, 5 and 6 of the DASC paper for a checkpoint; see --help."""

import sys

from dasc_jax.analysis.tables import main

if __name__ == "__main__":
    sys.exit(main())
