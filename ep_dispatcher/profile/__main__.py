"""One rank of `ep-dispatcher profile`."""

import sys

from ep_dispatcher.profile.command import rank_main

if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1:]))
