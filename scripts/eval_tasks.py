"""End tasks of the DASC paper against a running server: the same as `dasc eval-tasks`."""

import sys

from dasc_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval-tasks", *sys.argv[1:]]))
