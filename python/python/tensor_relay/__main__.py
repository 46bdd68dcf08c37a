"""The command `tensor-relay`, also run by `python -m tensor_relay`: the Rust command line, linked into this package."""

import signal
import sys

from . import _native


def main() -> None:
    # Python raises KeyboardInterrupt only between its own bytecodes, and none run during `run_command`. With the
    # default action, SIGINT reaches the command's own handler or ends the process. An inherited SIG_IGN stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # -P: a folder `tensor_relay` in the current directory must not be imported instead of this package.
    program = [sys.executable, "-P", "-m", "tensor_relay"]
    sys.exit(_native.run_command(["tensor-relay", *sys.argv[1:]], program))


if __name__ == "__main__":
    main()
