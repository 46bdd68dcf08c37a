"""The command `tensor-relay`, and `python -m tensor_relay`: the program of that name, from this package's library."""

import signal
import sys

from . import _native


def main() -> None:
    # Python notes a Ctrl-C and raises where its own code runs next, and none runs below. A command hears the signal itself,
    # or ends of it as a program does. Whoever started this process with the signal ignored meant that.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # -P: a folder of this package's name where the user is must not be taken for it.
    program = [sys.executable, "-P", "-m", "tensor_relay"]
    sys.exit(_native.run_command(["tensor-relay", *sys.argv[1:]], program))


if __name__ == "__main__":
    main()
