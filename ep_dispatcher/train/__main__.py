"""One rank of `torchrun ... -m ep_dispatcher.train --config FILE`."""

import sys


def main() -> int:
    """Parse the words, train as the rank that the environment names, return the exit code."""
    from ep_dispatcher.launch import rank_main

    return rank_main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
