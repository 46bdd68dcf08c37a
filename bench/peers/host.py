"""Functions of the operating system for peers: CPU time, ports, network devices, TCP's congestion control."""

import array
import errno
import fcntl
import os
import resource
import socket
import stat
import struct
import threading
from pathlib import Path


def cpu_seconds() -> float:
    """CPU time of this process and all its descendants: some peers work in helper processes."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return used + sum(map(_running_cpu_seconds, _descendants(os.getpid())))


def free_port(ip: str) -> int:
    """A TCP and UDP port that is free now, for libraries that cannot bind to port 0."""
    with socket.create_server((ip, 0)) as found, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        port: int = found.getsockname()[1]
        datagrams.bind((ip, port))
        return port


def is_listening(port: int) -> bool:
    """Whether a process in this network namespace listens on the TCP `port`, according to /proc."""
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    sockets = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == LISTEN for fields in sockets)


LISTEN = "0A"


def device_of(ip: str) -> str:
    """The name of the network device with the address `ip`, for libraries that need it."""
    with socket.socket(type=socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            if _address_of(any_socket, name) == ip:
                return name
    raise LookupError(f"no network device of this namespace has the address {ip}")


def use_cubic() -> None:
    """Sets CUBIC as the congestion control of every TCP connection of this process, including libraries'.

    Some systems have BBR as their default, whose pacing is slower on a fast path. A library's sockets are
    found by their file descriptors; setting an option on a duplicate affects the same connection.
    """
    for entry in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                _set_cubic(int(entry))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EPERM):
                raise  # The kernel lacks CUBIC, or does not permit it.
            # Otherwise the descriptor was closed meanwhile.


def bound_to_parent(command: list[str]) -> list[str]:
    """The `command`, changed so that the kernel terminates it when the thread that started it ends."""
    return ["setpriv", "--pdeathsig", "TERM", *command]


def end_with_stdin() -> None:
    """Starts a thread that exits this process when its standard input closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _set_cubic(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as other:
        if other.family in (socket.AF_INET, socket.AF_INET6) and other.type == socket.SOCK_STREAM:
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _address_of(any_socket: socket.socket, device: str) -> str | None:
    request = array.array("B", struct.pack("256s", device.encode()))
    try:
        fcntl.ioctl(any_socket, SIOCGIFADDR, request, True)
    except OSError:
        return None  # The device has no IPv4 address.
    return socket.inet_ntoa(request[20:24])


SIOCGIFADDR = 0x8915


def _descendants(pid: int) -> list[int]:
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in listing.read_text().split()]
        except OSError:
            continue  # The thread has ended.
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _running_cpu_seconds(pid: int) -> float:
    try:
        # The name before the last ")" may contain any character. Fields 14 to 17 are the user and system
        # ticks of the process and of its ended children.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # The process has ended: its parent counts its time.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
