"""Time the kernels and their peers beside the floor: see `pallas_kernels.bench.program`."""

import sys

from pallas_kernels.bench.program import run

if __name__ == "__main__":
    sys.exit(run())
