"""Addresses of servers: a host and a port, written `host:port`, or `[host]:port` if the host is an IPv6 address."""

import socket


def in_url(host: str) -> str:
    """Returns a host as URLs and addresses name it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def join_address(host: str, port: int) -> str:
    """Returns the address of a port."""
    return f"{in_url(host)}:{port}"


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a socket that is bound but does not listen yet. On `::` it takes IPv4 connections, too.

    Args:
        shared: Several sockets of this user can have the address.

    Raises:
        OSError: The address can't be used.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
