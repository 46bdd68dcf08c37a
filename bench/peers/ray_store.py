"""Ray: ray.put at the source's node, ray.get at the sink's, through Ray's object store.

Each side starts a Ray node of its own. The object's reference is sent through an actor at the sink's node, as
between Ray's tasks; small arrays are sent instead of references. Nothing else to tune: the object manager
transfers the bytes, always into new shared memory (measured on loopback: 1.4 GB/s). Its sockets belong to
other processes, so they use the system's default congestion control.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray

import contender
import host
from content import Bytes

MAILBOX = "mailbox"
NAMESPACE = "tensor-relay-peers"
INLINE_BYTES = 100 << 10
"""Ray sends values up to this size within its messages, without the object store."""

STORED_ROUNDS = 3
"""The rounds that an object store must hold: the current one, the previous one, and a spare."""
STORE_ROOM_BYTES = 256 << 20
"""Additional room in the object store, for Ray's own objects and small messages."""


@ray.remote
class Mailbox:
    """Passes references from one program to the other."""

    def __init__(self) -> None:
        self._references: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def put(self, reference: list[Any]) -> None:
        await self._references.put(reference)

    async def take(self) -> list[Any]:
        return await self._references.get()


class RaySource(contender.Source):
    def __init__(self, setting: contender.Setting) -> None:
        ip = _node_ip(setting)
        port = host.free_port(ip)
        _start_node(setting, ["--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=1"])
        self.hello = {"address": f"{ip}:{port}"}
        _connect(self.hello["address"], setting)

    def on_answer(self, answer: dict[str, Any]) -> None:
        self._mailbox = ray.get_actor(MAILBOX, NAMESPACE)

    def send(self, data: Bytes) -> None:
        self._sent = data if data.nbytes <= INLINE_BYTES else ray.put(data)
        self._mailbox.put.remote([self._sent])

    def release(self) -> None:
        del self._sent


class RaySink(contender.Sink):
    def __init__(self, setting: contender.Setting, hello: dict[str, Any]) -> None:
        _start_node(setting, [f"--address={hello['address']}", "--num-cpus=1", '--resources={"sink": 1}'])
        _connect(hello["address"], setting)
        self._mailbox = Mailbox.options(name=MAILBOX, resources={"sink": 0.1}, num_cpus=0).remote()

    def request(self) -> None:
        self._requested = self._mailbox.take.remote()

    def receive(self, into: Bytes) -> Bytes:
        [sent] = ray.get(self._requested)
        if isinstance(sent, ray.ObjectRef):
            sent = ray.get(sent)
        return np.asarray(sent)


def _start_node(setting: contender.Setting, options: list[str]) -> None:
    """Starts a Ray node, whose processes end with this one."""
    ray_command = Path(sys.executable).with_name("ray")
    common = [
        f"--node-ip-address={_node_ip(setting)}",
        f"--object-store-memory={STORED_ROUNDS * setting.memory.nbytes + STORE_ROOM_BYTES}",
        "--disable-usage-stats",
        "--block",
    ]
    command = [str(ray_command), "start", *common, *options]
    subprocess.Popen(host.bound_to_parent(command), stdout=subprocess.DEVNULL)


def _node_ip(setting: contender.Setting) -> str:
    """The address of this side's node. On loopback each side has its own, so that Ray sees two nodes."""
    if not setting.local_ip.startswith("127."):
        return setting.local_ip
    return {"serve": "127.0.0.2", "receive": "127.0.0.3"}[setting.options.role]


def _connect(address: str, setting: contender.Setting) -> None:
    """Connects to this side's node. Ray waits until the node has started."""
    ray.init(address, namespace=NAMESPACE, _node_ip_address=_node_ip(setting), log_to_driver=False)


if __name__ == "__main__":
    contender.main(RaySource, RaySink)
