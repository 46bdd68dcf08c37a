"""PyTorch's Gloo: torch.distributed send and recv between two ranks, over TCP.

Nothing to tune: the whole tensor in one call, received into the reused array (measured: 4.5 GB/s on loopback,
3.1 between veth devices). The network device is set, since Gloo would otherwise guess it from the host name.
"""

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

import contender
import host
from content import Bytes

SOURCE, SINK = 0, 1


class GlooSource(contender.Source):
    def __init__(self, setting: contender.Setting) -> None:
        self._setting = setting
        self.hello = {"port": host.free_port(setting.local_ip)}

    def accept(self) -> None:
        _join(self._setting, self.hello["port"], SOURCE)

    def send(self, data: Bytes) -> None:
        dist.send(torch.from_numpy(data), dst=SINK)


class GlooSink(contender.Sink):
    def __init__(self, setting: contender.Setting, hello: dict[str, Any]) -> None:
        _join(setting, hello["port"], SINK)

    def receive(self, into: Bytes) -> Bytes:
        dist.recv(torch.from_numpy(into), src=SOURCE)
        return into


def _join(setting: contender.Setting, port: int, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = host.device_of(setting.local_ip)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{setting.peer_ip}:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=contender.TIMEOUT_S),
    )


if __name__ == "__main__":
    contender.main(GlooSource, GlooSink)
