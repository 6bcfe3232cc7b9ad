"""`python -m examples.demo` makes the runs and compares them."""

import sys

from examples.demo.runs import main

if __name__ == "__main__":
    sys.exit(main())
