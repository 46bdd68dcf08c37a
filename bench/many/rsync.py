"""rsync in a chain: each host takes the whole file from the one before, and serves it to the next one."""

import pathlib
import subprocess
import time

CONFIGURATION = """use chroot = no
uid = 0
gid = 0
[files]
path = {folder}
read only = yes
"""


def serve(host, folder):
    file = folder / "rsyncd.conf"
    file.write_text(CONFIGURATION.format(folder=folder))
    command = host.command("rsync", "--daemon", "--no-detach", f"--config={file}", f"--address={host.address}")
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    ping = host.command("rsync", f"rsync://{host.address}/files/")
    while subprocess.run(ping, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode:
        time.sleep(0.01)
    return server


def chain(hosts, folder, name):
    """Copies the file `name` from the first host to all others, and returns when each had it."""
    folders = [folder, *(folder / f"rsync-{host.name}" for host in hosts[1:])]
    for each in folders[1:]:
        each.mkdir()
    servers, times = [], []
    try:
        for source, host, own in zip(hosts, hosts[1:], folders[1:], strict=False):
            servers.append(serve(source, folders[len(times)]))
            copy = host.command("rsync", "--whole-file", f"rsync://{source.address}/files/{name}", own)
            subprocess.run(copy, check=True)
            times.append(time.monotonic())
        expected = pathlib.Path(folder, name).stat().st_size
        assert all((own / name).stat().st_size == expected for own in folders[1:])
    finally:
        for server in servers:
            server.terminate()
            server.wait()
        for each in folders[1:]:
            for file in each.iterdir():
                file.unlink()
            each.rmdir()
    return times
