"""UCXX: RAPIDS' send and recv, over UCX's TCP.

`TLS=tcp` keeps it from shared memory. The whole tensor in one call, received into the reused array (research: 0.8 GB/s on
loopback, 1.6 between veth devices). Tuned: this program's own loop polls; the default thread wakes up every few
milliseconds only.
"""

import argparse
import asyncio
from collections.abc import Coroutine
from typing import Any

import ucxx

import contender
import host
from content import Bytes


class UcxxSource(contender.Source):
    def __init__(self, setting: contender.Setting) -> None:
        self._loop = Loop(setting)
        self._endpoint: asyncio.Future[Any] = self._loop.run(_future())
        self._listener = ucxx.create_listener(self._connected)
        self.hello = {"port": self._listener.port}

    def accept(self) -> None:
        self._connection = self._loop.run(_result(self._endpoint))

    def send(self, data: Bytes) -> None:
        self._loop.run(self._connection.send(data))

    async def _connected(self, endpoint: Any) -> None:
        self._endpoint.set_result(endpoint)


class UcxxSink(contender.Sink):
    def __init__(self, setting: contender.Setting, hello: dict[str, Any]) -> None:
        self._loop = Loop(setting)
        self._connection = self._loop.run(ucxx.create_endpoint(setting.peer_ip, hello["port"]))

    def receive(self, into: Bytes) -> Bytes:
        self._loop.run(self._connection.recv(into))
        return into


class Loop:
    """Where UCXX lives: everything that it does happens in here."""

    def __init__(self, setting: contender.Setting) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        options = {"TLS": "tcp", "NET_DEVICES": host.device_of(setting.local_ip)}
        self.run(_init(options, setting.options.progress))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, contender.DEADLINE_S))


async def _init(options: dict[str, str], progress: str) -> None:
    ucxx.init(options, progress_mode=progress)


async def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


async def _result(future: "asyncio.Future[Any]") -> Any:
    return await future


def _options(parser: argparse.ArgumentParser) -> None:
    modes = ["polling", "thread", "thread-polling", "blocking"]
    parser.add_argument("--progress", choices=modes, default="polling", help="who drives UCX")


if __name__ == "__main__":
    contender.main(UcxxSource, UcxxSink, _options)
