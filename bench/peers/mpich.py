"""MPI, by MPICH: Send and Recv over TCP, between two programs that connect through an MPI port.

Tuned: libfabric's TCP provider, which costs half as much CPU as UCX's TCP here; the whole tensor in one call,
received into the reused array. Each program must be started by an `mpiexec -n 1` of its own: otherwise both
have the same identity, and connecting fails ("Invalid communicator").
"""

import importlib
import os
from pathlib import Path
from typing import Any

import contender
import host
from content import Bytes


class MpichSource(contender.Source):
    def __init__(self, setting: contender.Setting) -> None:
        self._mpi = _mpi(setting)
        self.hello = {"port": self._mpi.Open_port()}

    def accept(self) -> None:
        self._sink = self._mpi.COMM_SELF.Accept(self.hello["port"])

    def send(self, data: Bytes) -> None:
        self._sink.Send(data, 0)


class MpichSink(contender.Sink):
    def __init__(self, setting: contender.Setting, hello: dict[str, Any]) -> None:
        self._source = _mpi(setting).COMM_SELF.Connect(hello["port"])

    def receive(self, into: Bytes) -> Bytes:
        self._source.Recv(into, 0)
        return into


def _mpi(setting: contender.Setting) -> Any:
    """Imports MPI, which starts it; the environment must be set before."""
    os.environ["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    os.environ["FI_PROVIDER"] = "tcp"
    os.environ["FI_TCP_IFACE"] = host.device_of(setting.local_ip)
    mpi = importlib.import_module("mpi4py.MPI")
    _unlink_shared_memory()
    return mpi


def _unlink_shared_memory() -> None:
    """Unlinks MPICH's shared memory, which MPICH itself does only in an orderly shutdown."""
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        path = mapping.split()[-1]
        if path.startswith("/dev/shm/mpich_shm_"):
            Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    contender.main(MpichSource, MpichSink)
