"""Time a prefill of a released model at its real size: see `dasc_jax.programs.prefill_step`."""

import sys

from dasc_jax.programs.prefill_step import main

if __name__ == "__main__":
    sys.exit(main())
