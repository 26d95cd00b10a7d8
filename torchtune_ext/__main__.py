"""Makes `python -m torchtune_ext` do what `torchtune-ext` does, also where that script is not on PATH."""

import sys

from torchtune_ext.cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
