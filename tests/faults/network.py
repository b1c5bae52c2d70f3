"""Machines that are none: network namespaces on one bridge, whose links can be cut or made slow. Needs root."""

import os
import subprocess
from contextlib import suppress

SLOW_RATE = "2mbit"

_BRIDGE_ADDRESS = "02:00:00:00:00:01"


def ip(*arguments: str) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def tc(*arguments: str) -> None:
    """Runs `tc`."""
    subprocess.run(["tc", *arguments], check=True, capture_output=True)


def available() -> bool:
    """Whether this process may make namespaces."""
    probe = f"cpd-probe-{os.getpid()}"
    try:
        ip("netns", "add", probe)
    except (OSError, subprocess.CalledProcessError):
        return False
    ip("netns", "del", probe)
    return True


class Network:
    """A bridge, to which machines are linked. This process is at `host(0)`."""

    def __init__(self) -> None:
        number = os.getpid()
        self._tag = f"{number % 100_000:x}"
        self._prefix = f"10.{100 + number % 150}.{number // 150 % 250}"
        self._bridge = f"cpdb{self._tag}"
        self._machines: list[str] = []

    def host(self, number: int) -> str:
        """The address of machine `number`."""
        return f"{self._prefix}.{number + 1}"

    def start(self) -> None:
        """Makes the bridge."""
        # Without an address of its own it takes a link's, and another one when that link is cut: who spoke with this
        # process would go on speaking to the old one.
        ip("link", "add", self._bridge, "address", _BRIDGE_ADDRESS, "type", "bridge")
        ip("addr", "add", f"{self.host(0)}/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")

    def stop(self) -> None:
        """Leaves nothing behind. The machines' processes must have ended."""
        # a link is gone at once; one that ends with its namespace, some time later, and its name is taken till then
        links = [("link", self._link(name)) for name in self._machines]
        namespaces = [("netns", self.namespace(name)) for name in self._machines]
        for kind, name in [*links, *namespaces, ("link", self._bridge)]:
            with suppress(subprocess.CalledProcessError):  # a machine that came only half into being
                ip(kind, "del", name)

    def add(self, name: str) -> str:
        """A new machine; returns its address."""
        self._machines.append(name)
        number, namespace = len(self._machines), self.namespace(name)
        ip("netns", "add", namespace)
        ip("link", "add", self._link(name), "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", self._link(name), "master", self._bridge, "up")
        ip("-n", namespace, "addr", "add", f"{self.host(number)}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        return self.host(number)

    def namespace(self, name: str) -> str:
        """The machine's namespace."""
        return f"cpd{self._tag}-{name}"

    def cut(self, name: str) -> None:
        """Nothing reaches the machine or leaves it; nobody is told."""
        ip("link", "set", self._link(name), "nomaster")

    def join(self, name: str) -> None:
        """Undoes `cut`."""
        ip("link", "set", self._link(name), "master", self._bridge)

    def part(self, one: str, other: str) -> None:
        """Two machines do not reach each other any more; all others do."""
        for here, there in ((one, other), (other, one)):
            address = self.host(1 + self._machines.index(there))
            nowhere = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
            ip("-n", self.namespace(here), "neigh", "replace", address, *nowhere)

    def unite(self, one: str, other: str) -> None:
        """Undoes `part`."""
        for here, there in ((one, other), (other, one)):
            address = self.host(1 + self._machines.index(there))
            ip("-n", self.namespace(here), "neigh", "del", address, "dev", "eth0")

    def slow(self, name: str) -> None:
        """What the machine sends and gets takes long."""
        shape = ("root", "tbf", "rate", SLOW_RATE, "burst", "16kb", "latency", "400ms")
        tc("qdisc", "replace", "dev", self._link(name), *shape)
        tc("-n", self.namespace(name), "qdisc", "replace", "dev", "eth0", *shape)

    def fast(self, name: str) -> None:
        """Undoes `slow`."""
        tc("qdisc", "del", "dev", self._link(name), "root")
        tc("-n", self.namespace(name), "qdisc", "del", "dev", "eth0", "root")

    def _link(self, name: str) -> str:
        return f"v{self._tag}-{self._machines.index(name)}"
