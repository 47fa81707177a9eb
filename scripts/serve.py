"""Start the OpenAI-compatible server: the same as `dasc serve`."""

import sys

from dasc_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
