"""`python -m ep_dispatcher` is the `ep-dispatcher` command."""

import sys

from ep_dispatcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
