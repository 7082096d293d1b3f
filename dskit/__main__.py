"""`python -m dskit`, which is the console script `dskit` under a name that torchrun can start."""

import sys

from dskit.cli import main

if __name__ == "__main__":
    sys.exit(main())
