#!/usr/bin/env python3
"""A torrent by aria2 or Transmission: its description, a tracker that names everybody to everybody, and the downloads.

As a program it is the tracker: `torrent.py ADDRESS`.
"""

import hashlib
import http.server
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse

PIECE_BYTES = 1 << 20
TRACKER_PORT = 6969
PEER_PORT = 6881
DEADLINE_S = 900
# Everything that slows a download down, or keeps peers apart, is off: of aria2,
ARIA2_OPTIONS = [
    "--quiet", "--no-conf", "--enable-dht=false", "--enable-dht6=false", "--bt-enable-lpd=false", "--disable-ipv6",
    f"--listen-port={PEER_PORT}", "--bt-max-peers=0", "--bt-request-peer-speed-limit=0", "--file-allocation=none",
    "--seed-ratio=0.0", "--bt-tracker-interval=1", "--bt-stop-timeout=0", "--max-overall-upload-limit=0",
]
# and of Transmission, whose transport over UDP gives way to everything else.
TRANSMISSION_SETTINGS = {
    "dht-enabled": False, "lpd-enabled": False, "utp-enabled": False, "encryption": 0, "preallocation": 0,
    "peer-port": PEER_PORT, "peer-limit-per-torrent": 200, "upload-slots-per-torrent": 200, "port-forwarding-enabled": False,
    "ratio-limit-enabled": False, "speed-limit-up-enabled": False, "speed-limit-down-enabled": False, "blocklist-enabled": False,
}


def bencode(value):
    match value:
        case int():
            return b"i%de" % value
        case bytes():
            return b"%d:%s" % (len(value), value)
        case str():
            return bencode(value.encode())
        case list():
            return b"l" + b"".join(map(bencode, value)) + b"e"
        case dict():
            return b"d" + b"".join(bencode(key) + bencode(value[key]) for key in sorted(value)) + b"e"


def describe(file, tracker):
    """The content of the .torrent of `file`."""
    pieces = b""
    with file.open("rb") as content:
        while piece := content.read(PIECE_BYTES):
            pieces += hashlib.sha1(piece).digest()
    info = {"name": file.name, "length": file.stat().st_size, "piece length": PIECE_BYTES, "pieces": pieces}
    return bencode({"announce": f"http://{tracker}:{TRACKER_PORT}/announce", "info": info})


class Tracker(http.server.BaseHTTPRequestHandler):
    peers = {}  # noqa: RUF012, one for the process

    def do_GET(self):
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        if query.get("event") == ["stopped"]:
            self.peers.pop(self.client_address[0], None)
        else:
            self.peers[self.client_address[0]] = int(query["port"][0])
        others = [(address, port) for address, port in self.peers.items() if address != self.client_address[0]]
        compact = b"".join(socket.inet_aton(address) + port.to_bytes(2, "big") for address, port in others)
        answer = bencode({"interval": 1, "min interval": 1, "peers": compact})
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def aria2(torrent, folder, done, seeds):
    """The command that downloads into a folder, and seeds; `done` is executed when everything is there."""
    verify = ["--check-integrity=true", "--bt-hash-check-seed=true"] if seeds else []
    return ["aria2c", *ARIA2_OPTIONS, *verify, f"--dir={folder}", f"--on-bt-download-complete={done}", torrent]


def transmission(torrent, folder, done, seeds):
    """As `aria2`."""
    config = folder / "transmission"
    config.mkdir(exist_ok=True)
    (config / "settings.json").write_text(json.dumps(TRANSMISSION_SETTINGS))
    verify = ["--verify"] if seeds else []
    return ["transmission-cli", "--config-dir", config, "--download-dir", folder, "--finish", done, *verify, torrent]


CLIENTS = {"aria2": aria2, "transmission": transmission}


class Swarm:
    """A tracker and a seed at the origin. `client` is one of `CLIENTS`."""

    def __init__(self, client, origin, folder, name):
        self.client, self.folder, self.name = CLIENTS[client], folder, name
        self.torrent = folder / "model.torrent"
        self.torrent.write_bytes(describe(folder / name, origin.address))
        self.done = folder / "torrent-done"
        # aria2 names the file as an argument, Transmission the folder in the environment.
        self.done.write_text('#!/bin/sh\ntouch "${TR_TORRENT_DIR:-${3%/*}}/done"\n')
        self.done.chmod(0o755)
        self.processes = [subprocess.Popen(origin.command("python3", pathlib.Path(__file__), origin.address))]
        self.folders = []
        while subprocess.run(origin.command("bash", "-c", f"</dev/tcp/{origin.address}/{TRACKER_PORT}"),
                             stderr=subprocess.DEVNULL, check=False).returncode:
            time.sleep(0.01)
        self.start(origin, folder, seeds=True)
        time.sleep(5)  # It hashes the file, and announces itself; there is no event for that.

    def start(self, host, folder, seeds=False):
        command = host.command(*self.client(self.torrent, folder, self.done, seeds))
        self.processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def download(self, hosts):
        """Downloads to these hosts at once, and returns when each had everything. They go on seeding."""
        waiting = {}
        for host in hosts:
            own = self.folder / f"torrent-{host.name}"
            own.mkdir()
            self.folders.append(own)
            waiting[host.name] = own / "done"
        for host in hosts:
            self.start(host, waiting[host.name].parent)
        times, deadline = {}, time.monotonic() + DEADLINE_S
        while waiting:
            for host, file in list(waiting.items()):
                if file.exists():
                    times[host] = time.monotonic()
                    del waiting[host]
            if time.monotonic() > deadline:
                raise SystemExit(f"the torrent did not arrive at {list(waiting)}")
            time.sleep(0.01)
        return [times[host.name] for host in hosts]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()
        for folder in (*self.folders, self.folder / "transmission"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    http.server.ThreadingHTTPServer((sys.argv[1], TRACKER_PORT), Tracker).serve_forever()
