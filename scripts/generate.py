"""Continue a prompt without a server: the same as `dasc generate`."""

import sys

from dasc_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
