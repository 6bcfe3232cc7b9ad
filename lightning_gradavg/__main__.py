"""`python -m lightning_gradavg` is the console command `gradavg`."""

import sys

from lightning_gradavg.cli import main

if __name__ == "__main__":
    sys.exit(main())
