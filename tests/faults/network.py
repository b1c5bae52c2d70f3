"""Simulated machines: network namespaces on one bridge, whose links can be cut or slowed down. Needs root."""

import json
import os
import subprocess
from contextlib import suppress
from itertools import count

SLOW_RATE = "2mbit"

_MOST_OF_A_PROCESS = 16
"""Networks that a process may make, so that no two have the same names and addresses."""

_numbers = count()

_BRIDGE_ADDRESS = "02:00:00:00:00:01"


def ip(*arguments: str) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def tc(*arguments: str) -> None:
    """Runs `tc`."""
    subprocess.run(["tc", *arguments], check=True, capture_output=True)


def available() -> bool:
    """True if this process may create network namespaces."""
    probe = f"cpd-probe-{os.getpid()}"
    try:
        ip("netns", "add", probe)
    except (OSError, subprocess.CalledProcessError):
        return False
    ip("netns", "del", probe)
    return True


class Network:
    """A bridge with one link, `eth0`, to each machine. This process has the address `host(0)`.

    Args:
        ipv6: All addresses are IPv6.
    """

    def __init__(self, *, ipv6: bool = False) -> None:
        number = os.getpid() * _MOST_OF_A_PROCESS + next(_numbers)
        self._tag = f"{number % 0xFFFFFF:x}"
        self._prefix = f"fd00:{number % 0xFFFF:x}::" if ipv6 else f"10.{100 + number % 150}.{number // 150 % 250}."
        # an IPv6 address could not be used at once if it were first asked for in the network
        self._given = ("nodad",) if ipv6 else ()
        self._bits = 64 if ipv6 else 24
        self._bridge = f"cpdb{self._tag}"
        self._machines: list[str] = []

    def host(self, number: int) -> str:
        """The address of machine `number`."""
        return f"{self._prefix}{number + 1:x}" if self._bits == 64 else f"{self._prefix}{number + 1}"

    def start(self) -> None:
        """Creates the bridge."""
        # A bridge without its own MAC address takes that of a link, and another one when that link is cut; peers would
        # keep sending to the old one.
        ip("link", "add", self._bridge, "address", _BRIDGE_ADDRESS, "type", "bridge")
        ip("addr", "add", f"{self.host(0)}/{self._bits}", "dev", self._bridge, *self._given)
        ip("link", "set", self._bridge, "up")

    def stop(self) -> None:
        """Deletes everything. The processes on the machines must have ended."""
        # Links first: a link that is deleted along with its namespace keeps its name for a while.
        links = [("link", self._link(name)) for name in self._machines]
        namespaces = [("netns", self.namespace(name)) for name in self._machines]
        for kind, name in [*links, *namespaces, ("link", self._bridge)]:
            with suppress(subprocess.CalledProcessError):  # `add` may have failed halfway
                ip(kind, "del", name)

    def add(self, name: str) -> str:
        """Adds a machine and returns its address."""
        self._machines.append(name)
        number, namespace = len(self._machines), self.namespace(name)
        ip("netns", "add", namespace)
        ip("link", "add", self._link(name), "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", self._link(name), "master", self._bridge, "up")
        ip("-n", namespace, "addr", "add", f"{self.host(number)}/{self._bits}", "dev", "eth0", *self._given)
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        return self.host(number)

    def add_second_link(self, name: str) -> None:
        """Gives the machine a second interface, `eth1`, in another network."""
        second, number = f"{self._link(name)}b", 1 + self._machines.index(name)
        ip("link", "add", second, "type", "veth", "peer", "name", "eth1", "netns", self.namespace(name))
        ip("link", "set", second, "master", self._bridge, "up")
        ip("-n", self.namespace(name), "addr", "add", f"192.168.77.{number}/24", "dev", "eth1")
        ip("-n", self.namespace(name), "link", "set", "eth1", "up")

    def sent_bytes(self, name: str, interface: str) -> int:
        """How many bytes the machine has sent over an interface."""
        show = ["ip", "-n", self.namespace(name), "-s", "-j", "link", "show", interface]
        (link,) = json.loads(subprocess.run(show, check=True, capture_output=True).stdout)
        return int(link["stats64"]["tx"]["bytes"])

    def namespace(self, name: str) -> str:
        """The name of the machine's network namespace."""
        return f"cpd{self._tag}-{name}"

    def disconnect(self, name: str) -> None:
        """Drops everything to and from the machine; connections are not reset."""
        ip("link", "set", self._link(name), "nomaster")

    def reconnect(self, name: str) -> None:
        """Undoes `disconnect`."""
        ip("link", "set", self._link(name), "master", self._bridge)

    def partition(self, one: str, other: str) -> None:
        """Drops everything between two machines; both still reach all others."""
        for here, there in ((one, other), (other, one)):
            address = self.host(1 + self._machines.index(there))
            nowhere = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
            ip("-n", self.namespace(here), "neigh", "replace", address, *nowhere)

    def end_partition(self, one: str, other: str) -> None:
        """Undoes `partition`."""
        for here, there in ((one, other), (other, one)):
            address = self.host(1 + self._machines.index(there))
            ip("-n", self.namespace(here), "neigh", "del", address, "dev", "eth0")

    def throttle(self, name: str) -> None:
        """Limits the machine's link to SLOW_RATE in both directions."""
        shape = ("root", "tbf", "rate", SLOW_RATE, "burst", "16kb", "latency", "400ms")
        tc("qdisc", "replace", "dev", self._link(name), *shape)
        tc("-n", self.namespace(name), "qdisc", "replace", "dev", "eth0", *shape)

    def unthrottle(self, name: str) -> None:
        """Undoes `throttle`."""
        tc("qdisc", "del", "dev", self._link(name), "root")
        tc("-n", self.namespace(name), "qdisc", "del", "dev", "eth0", "root")

    def _link(self, name: str) -> str:
        return f"v{self._tag}-{self._machines.index(name)}"
