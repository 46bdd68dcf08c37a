"""`python -m tensor_relay`: says which tensor-relay this is, and where to read on."""

import argparse
import sys

from . import __version__
from ._native import BUILD


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tensor_relay",
        description="Says which tensor-relay this is. It is used from programs: `import tensor_relay`.",
    )
    parser.add_argument("--version", action="version", version=f"tensor_relay {__version__}")
    parser.parse_args()
    print(
        f"tensor_relay {__version__} ({BUILD}), Python {sys.version.split()[0]}",
        "  in a program:      import tensor_relay; help(tensor_relay)",
        "  how to begin:      https://github.com/tensor-relay/tensor-relay/blob/main/python/README.md",
        "  the command line:  tensor-relay, a program of its own, which is not in this package:",
        "                     https://github.com/tensor-relay/tensor-relay#readme",
        sep="\n",
    )


if __name__ == "__main__":
    main()
