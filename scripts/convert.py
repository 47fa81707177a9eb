"""Convert a released checkpoint to a native Orbax directory; see `--help`."""

import sys

from dasc_jax.weights.convert import main

if __name__ == "__main__":
    sys.exit(main())
