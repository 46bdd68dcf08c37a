"""What a peer asks of the system: CPU time, ports, devices, and which congestion control TCP uses."""

import array
import fcntl
import os
import resource
import socket
import stat
import struct
import threading
from pathlib import Path


def cpu_seconds() -> float:
    """CPU time of this process and of all that descend from it: some peers work in helpers of their own."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return used + sum(map(_running_cpu_seconds, _descendants(os.getpid())))


def free_port(ip: str) -> int:
    """A TCP and UDP port that nobody uses now, for libraries that cannot be told to choose one themselves."""
    with socket.create_server((ip, 0)) as found, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        port: int = found.getsockname()[1]
        datagrams.bind((ip, port))
        return port


def is_listening(port: int) -> bool:
    """Whether anybody in this network namespace accepts TCP connections at `port`, by the kernel's word."""
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    sockets = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == LISTEN for fields in sockets)


LISTEN = "0A"


def device_of(ip: str) -> str:
    """The network device that has the address `ip`, for libraries that want its name."""
    with socket.socket(type=socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            if _address_of(any_socket, name) == ip:
                return name
    raise LookupError(f"no network device of this namespace has the address {ip}")


def use_cubic() -> None:
    """Sets the congestion control of every TCP connection of this process, whoever opened it.

    Some systems have BBR as their default, which paces: on a fast path it is slower. A library's sockets are
    found by their file descriptors, and a duplicate of one reaches the same connection.
    """
    for entry in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                _set_cubic(int(entry))
        except OSError:
            continue  # It was closed meanwhile, or is not connected: then it carries nothing.


def with_us(command: list[str]) -> list[str]:
    """`command`, but so that the kernel ends it when the thread that starts it is gone, however it went."""
    return ["setpriv", "--pdeathsig", "TERM", *command]


def end_with_stdin() -> None:
    """Ends this process when its standard input closes, whatever it is doing."""

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
        return None  # It has no IPv4 address.
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
        # The name before the last ")" may contain anything; user and system ticks, and those of the children
        # that ended, are the fields 14 to 17.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # It has ended: what it used is counted with the ended ones.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
