"""Time a store and a load of checkpoints over ranks: see `dasc_jax.programs.transfer`."""

import sys

from dasc_jax.programs.transfer import main

if __name__ == "__main__":
    sys.exit(main())
