"""`python -m torchtune_ext` is `torchtune-ext`, also where the scripts of this environment are not on PATH."""

import sys

from torchtune_ext.host.cli import main

if __name__ == "__main__":
    sys.exit(main())
