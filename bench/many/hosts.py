"""Hosts on one switch, as network namespaces of this machine, each behind a link of its own with a limited rate."""

import os
import subprocess

# Bytes that a link's queue holds at most, as time at its rate.
QUEUE_MS = 50


def ip(*args):
    subprocess.run(["ip", *args], check=True)


class Host:
    """A host; its link limits what it sends and what it receives."""

    def __init__(self, switch, number, name):
        self.name, self.space, self.switch = name, f"{switch}-{number}", switch
        self.port, self.address = f"port{number}", f"10.214.0.{number + 1}"
        ip("netns", "add", self.space)
        ip("link", "add", "lan", "netns", self.space, "type", "veth", "peer", "name", self.port, "netns", switch)
        ip("-n", switch, "link", "set", self.port, "master", "bridge", "up")
        ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", "lan")
        for link in ("lo", "lan"):
            ip("-n", self.space, "link", "set", link, "up")

    def limit(self, mbit):
        """Limits the rate in each direction."""
        burst = f"{min(max(5 * mbit, 16), 256)}k"
        shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", burst, "latency", f"{QUEUE_MS}ms"]
        for space, link in ((self.space, "lan"), (self.switch, self.port)):
            subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", link, *shape], check=True)

    def command(self, *command):
        """`command` on this host. `ip` executes it in its own place, so that signals reach it."""
        return ["ip", "netns", "exec", self.space, *map(str, command)]

    def traffic(self):
        """The bytes that this host has sent and received, with all headers that the kernel counts."""
        folder = "/sys/class/net/lan/statistics"
        read = self.command("cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes")
        sent, received = subprocess.run(read, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        return int(sent), int(received)

    def remove(self):
        subprocess.run(["ip", "netns", "del", self.space], check=False)


class Lan:
    """An origin and members on a switch. Leaving it removes all of them."""

    def __init__(self, members):
        self.switch = f"relay-{os.getpid()}"
        self.hosts = []
        self.members = members

    def __enter__(self):
        ip("netns", "add", self.switch)
        try:
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.switch, "link", "set", "bridge", "up")
            for number in range(self.members + 1):
                name = "origin" if number == 0 else f"member{number}"
                self.hosts.append(Host(self.switch, number, name))
        except BaseException:
            self.__exit__()
            raise
        self.origin, self.members = self.hosts[0], self.hosts[1:]
        return self

    def limit(self, mbit):
        for host in self.hosts:
            host.limit(mbit)

    def __exit__(self, *_):
        for host in self.hosts:
            host.remove()
        subprocess.run(["ip", "netns", "del", self.switch], check=False)
