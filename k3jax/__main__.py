"""`python -m k3jax` is the command line."""

import sys

from k3jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
