"""`cpd doctor`: checks, without starting anything, whether a cluster can start with its settings, one line a check.

What `cpd up` itself refuses is checked by the same functions.
"""

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rich.console import Console

from cpd.common.addresses import join_address
from cpd.common.errors import CPDError
from cpd.common.redis_client import NoPermissionError, Redis, RedisError
from cpd.common.settings import ClusterSettings
from cpd.common.trust import NO_SECRET, is_loopback, read_secret
from deploy.cluster_status import read_leases
from deploy.endpoint import WILDCARDS, pick_port
from deploy.logs import log_file
from deploy.model import check_models, resolve_model
from deploy.planner import check_bounds
from deploy.redis import embedded_redis
from deploy.session import OBJECT_STORE_BYTES, check_reachable
from deploy.state import ClusterDir, running_clusters
from deploy.up import prepared
from kvtransfer.addresses import rdma_ports

_FILES = 4096
_FREE_BYTES = 1 << 30
_OLDEST_REDIS = (6, 2)
_ROUTES = Path("/proc/net/route")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        level: `error` if the cluster can't start.
        text: What was found, and what to do about it.
    """

    level: Literal["ok", "warning", "error"]
    text: str


Check = Callable[[ClusterSettings], Iterator[Finding]]


def doctor(settings: ClusterSettings) -> None:
    """Prints a line for each check; exits with code 1 if the cluster can't start."""
    console = Console(highlight=False)
    styles = {"ok": "green", "warning": "yellow", "error": "red"}
    failed = False
    for name, check in CHECKS.items():
        for finding in examine(check, settings):
            failed |= finding.level == "error"
            console.print(f"{finding.level:8}", style=styles[finding.level], end="")
            console.print(f"{name:12}{finding.text}", markup=False, soft_wrap=True)
    sys.exit(int(failed))


def examine(check: Check, settings: ClusterSettings) -> Iterator[Finding]:
    """Yields what a check finds; what it raises is an error that it finds."""
    try:
        yield from check(settings)
    except CPDError as error:
        yield Finding("error", str(error))


def _name(settings: ClusterSettings) -> Iterator[Finding]:
    if ClusterDir(settings.cluster).read():
        yield Finding("error", f"cluster '{settings.cluster}' runs already: `cpd down`, or choose another --cluster")
    else:
        others = [name for name in running_clusters() if name != settings.cluster]
        yield Finding(
            "ok", f"'{settings.cluster}' is free" + (f"; others that run: {', '.join(others)}" * bool(others))
        )


def _settings(settings: ClusterSettings) -> Iterator[Finding]:
    check_bounds(settings)
    prepared(settings)
    if settings.secret_file:
        read_secret(settings.secret_file)
    yield Finding("ok", "the policy, the profile, the key file and the secret can be read")


def _port(settings: ClusterSettings) -> Iterator[Finding]:
    pick_port(settings.host, settings.port)
    yield Finding("ok", f"{join_address(settings.host, settings.port)} is free")


def _model(settings: ClusterSettings) -> Iterator[Finding]:
    settings.check_models()
    models = settings.each_model()
    device = check_models(models)
    for one in models:
        directory, workers = resolve_model(one.model), f"{one.combined} combined and {one.prefill} prefill workers"
        if settings.ray_address:
            yield Finding("ok", f"{directory} can be served; whether it fits shows on the machines of the Ray cluster")
        elif settings.simulate:
            yield Finding("ok", f"{directory}: its tokenizer serves {workers}, which are simulated")
        else:
            beside = ", beside the other models" if settings.models else ""
            yield Finding("ok", f"{directory} fits on the {device} for {workers}{beside}")
    if device == "cpu" and settings.device == "auto" and not settings.simulate and (gpus := _gpus()):
        yield Finding("warning", f"the driver sees {gpus} GPUs, but torch can't use them: install a torch with CUDA")


def _redis(settings: ClusterSettings) -> Iterator[Finding]:
    if not settings.redis_url:
        with (
            tempfile.TemporaryDirectory(prefix="cpd-", dir="/tmp") as directory,
            embedded_redis(Path(directory) / "r"),
        ):
            pass
        yield Finding("ok", "the embedded one starts")
        if settings.ray_address:
            yield Finding("warning", "several hosts can't share the embedded one: start one and pass --redis-url")
        return

    async def version() -> str:
        async with Redis.from_url(settings.redis_url) as redis:
            answer: Any = await redis.execute_command("HELLO")  # type: ignore[no-untyped-call]
            fields = dict(zip(answer[::2], answer[1::2], strict=True)) if isinstance(answer, list) else answer
            return str(fields[b"version"].decode())

    host = urlsplit(settings.redis_url).hostname
    try:
        found = asyncio.run(version())
    except NoPermissionError:
        read_leases(settings.redis_url, settings.cluster, NO_SECRET)
        yield Finding(
            "warning", "it answers, but its user may not ask for the version (+hello): 6.2 or later is needed"
        )
        return
    except (RedisError, OSError, ValueError) as error:
        yield Finding("error", f"{host or 'the Unix socket'} does not answer: {error}")
        return
    if tuple(map(int, found.split(".")[:2])) < _OLDEST_REDIS:
        yield Finding("error", f"{host} runs version {found}; 6.2 or later is needed")
        return
    read_leases(settings.redis_url, settings.cluster, NO_SECRET)
    if host and not is_loopback(host) and not urlsplit(settings.redis_url).password:
        yield Finding("warning", f"{host} answers without a password: whoever reaches it can disturb the cluster")
    else:
        yield Finding("ok", f"version {found} answers")


def _ray(settings: ClusterSettings) -> Iterator[Finding]:
    if settings.ray_address not in ("", "auto"):
        check_reachable(settings.ray_address)
        yield Finding("ok", f"something answers at {settings.ray_address}")
    else:
        yield Finding("ok", "a local one is started" if not settings.ray_address else "`cpd up` finds the one here")
    if settings.host in WILDCARDS and not _has_default_route():
        yield Finding(
            "warning", "this machine has no default route: for several hosts run `ray start` with --node-ip-address"
        )


def _rdma(settings: ClusterSettings) -> Iterator[Finding]:
    devices = rdma_ports()
    if not devices:
        yield Finding("ok", "no port with a link: pages between machines go by TCP")
        return
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        yield Finding("warning", f"{', '.join(devices)}: registering memory may fail; set `ulimit -l unlimited`")
    else:
        yield Finding("ok", f"{', '.join(devices)} and unlimited locked memory")


def _files(settings: ClusterSettings) -> Iterator[Finding]:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft < _FILES:
        yield Finding(
            "warning", f"a process may open {soft} files, and each connection is one: set `ulimit -n {_FILES}`"
        )
    else:
        yield Finding("ok", f"a process may open {soft}")


def _shared_memory(settings: ClusterSettings) -> Iterator[Finding]:
    free = shutil.disk_usage("/dev/shm").free
    if free < OBJECT_STORE_BYTES:
        yield Finding(
            "warning", f"it has {free >> 20} MiB free, Ray wants {OBJECT_STORE_BYTES >> 20}: use `--shm-size=1g`"
        )
    else:
        yield Finding("ok", f"it has {free >> 20} MiB free")


def _disk(settings: ClusterSettings) -> Iterator[Finding]:
    for what, path in (("runtime directory", ClusterDir(settings.cluster).path), ("log", log_file(settings.cluster))):
        place = next(folder for folder in path.parents if folder.exists())
        free = shutil.disk_usage(place).free
        if not os.access(place, os.W_OK):
            yield Finding("error", f"{what}: {place} is not writable")
        elif free < _FREE_BYTES:
            yield Finding("warning", f"{what}: {place} has {free >> 20} MiB free; make room")
        else:
            yield Finding("ok", f"{what}: {place} has {free >> 30} GiB free")


CHECKS: dict[str, Check] = {
    "cluster": _name,
    "settings": _settings,
    "port": _port,
    "model": _model,
    "redis": _redis,
    "ray": _ray,
    "rdma": _rdma,
    "open files": _files,
    "/dev/shm": _shared_memory,
    "disk": _disk,
}


def _gpus() -> int:
    """Returns the number of GPUs that the driver sees."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return 0


def _has_default_route() -> bool:
    """True if there is an IPv4 route to everywhere. https://docs.kernel.org/filesystems/proc.html#networking-info"""
    try:
        routes = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return True
    return any(route[1] == "00000000" for route in routes)
