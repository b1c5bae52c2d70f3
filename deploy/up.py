"""`cpd up`: checks the settings, starts a cluster, watches it, stops it.

Starts in this order, and stops in the reverse:
    runtime directory → Redis → Ray → placement group → supervising actors → processes
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console

from cpd.common.errors import ConfigError, CPDError
from cpd.common.membership import Member, members
from cpd.common.process import EXIT_DRAINED
from cpd.common.settings import ClusterSettings
from cpd.performance.model import Profile
from cpd.performance.profiles import absolute_profile
from deploy.cluster import Cluster, launched
from deploy.console import StartProgress, print_log, usage_hint
from deploy.endpoint import LOOPBACK, WILDCARDS, has_workers, pick_port, url_of
from deploy.model import check_model, resolve_model
from deploy.placement import bundles, gpu_share, local_resources
from deploy.processes import processes
from deploy.raydir import clear_ray_dir, make_ray_dir
from deploy.redis import EmbeddedRedis, embedded_redis
from deploy.session import GCS, RAYLET, dead_process, joined_ray, local_ray
from deploy.state import ClusterDir, ClusterState
from router.api.sampling import default_sampling
from router.api.tenants import read_keys
from router.placement.policies import make_policy
from simulated_workers.simulation import NOTICE

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STARTING_POLL_S, _RUNNING_POLL_S = 0.25, 1.0
_STARTS = 3
"""`cpd up` gives up when a process has died this often before it was ready."""
_SUPERVISOR_S = 60.0
"""Time limit for Ray to start an actor."""


def up(settings: ClusterSettings) -> None:
    """Starts a cluster and runs it until Ctrl-C."""
    _interrupt_on_signals()
    console = Console(stderr=True)
    try:
        _run(settings, console)
    except KeyboardInterrupt:
        console.print("Stopped.")


def _run(settings: ClusterSettings, console: Console) -> None:
    directory = ClusterDir(settings.cluster)
    with contextlib.ExitStack() as stack:
        stack.enter_context(directory.hold())
        settings = _checked(settings, console)
        state = ClusterState(
            cluster=settings.cluster,
            pid=os.getpid(),
            url=url_of(settings.host, settings.port),
            ray_dir="" if settings.ray_address else make_ray_dir(),
            cluster_token=settings.cluster_token.get_secret_value(),
        )
        if state.ray_dir:
            stack.callback(clear_ray_dir, state.ray_dir)
        directory.write(state)

        redis = None
        if not settings.redis_url:
            redis = stack.enter_context(embedded_redis(directory.redis_socket))
            settings = settings.model_copy(update={"redis_url": redis.url})
        _leases(settings)
        with console.status("Starting Ray" if state.ray_dir else "Joining Ray"):
            cluster = _launch(settings, state.ray_dir, stack, console, embedded=redis is not None)
        state = replace(state, url=_wait_until_ready(cluster, settings, state, console))
        directory.write(state)
        sys.stdout.write(
            usage_hint(state.url, settings.served_model_name, bool(settings.api_key or settings.api_key_file))
        )
        sys.stdout.flush()
        _watch(cluster, redis, console)


def _checked(settings: ClusterSettings, console: Console) -> ClusterSettings:
    """Returns the settings with all values filled in on which the processes must agree.

    Raises:
        CheckpointError, ConfigError: The cluster cannot run with these settings.
    """
    port = pick_port(settings.host, settings.port)
    directory = resolve_model(settings.model)
    for profile in filter(None, (settings.profile, settings.simulate)):
        Profile.load(profile)
    make_policy(settings.policy)
    if settings.api_key_file:
        read_keys(settings.api_key_file)
    with console.status(f"Checking {directory}"):
        device = check_model(directory, settings)
    if settings.simulate:
        console.print(NOTICE)
    if sampling := default_sampling(directory, settings.sampling_defaults):
        shown = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        console.print(f"Default sampling, from the model's generation_config.json: {shown}", soft_wrap=True)
    is_id = not Path(settings.model).expanduser().is_dir()
    return settings.model_copy(
        update={
            "port": port,
            "model": settings.model if is_id and settings.ray_address else str(directory),
            "profile": absolute_profile(settings.profile),
            "api_key_file": settings.api_key_file and settings.api_key_file.resolve(),
            "simulate": absolute_profile(settings.simulate),
            "device": device,
            "served_model_name": settings.served_model_name or (settings.model if is_id else directory.name),
            "cluster_token": settings.cluster_token if settings.cluster_token else SecretStr(secrets.token_urlsafe(32)),
        }
    )


def _launch(
    settings: ClusterSettings, ray_dir: str, stack: contextlib.ExitStack, console: Console, embedded: bool
) -> Cluster:
    """Starts or joins Ray and starts the processes there; `stack` ends them."""
    namespace = f"cpd-{settings.cluster}"
    if ray_dir:
        resources = local_resources(processes(settings, LOOPBACK))
        session = stack.enter_context(local_ray(namespace, f"{ray_dir}/ray", resources))
    else:
        session = stack.enter_context(joined_ray(namespace, settings.ray_address))
        _check_hosts(session.hosts, settings.host, embedded)
    _interrupt_on_signals()  # Ray has set its own handlers
    workers = settings.combined + settings.prefill
    share = gpu_share(settings.device, workers, session.gpus)
    if 0 < share < 1:
        console.print(
            f"{workers} workers share {session.gpus:g} GPUs, each with its own copy of the weights; for one worker per"
            f" GPU use --prefill 0 --combined {session.gpus:g}",
            soft_wrap=True,
        )
    # Not "auto": a worker that cannot use its GPU must fail, not compute on the CPU.
    settings = settings.model_copy(
        update={"device": "cuda" if share else "cpu", "gpu_memory": settings.gpu_memory * (share or 1)}
    )
    # Hosts may join a Ray of your own later; their processes must reach the workers here.
    worker_host = LOOPBACK if ray_dir or settings.host not in WILDCARDS else settings.host
    specs = processes(settings, worker_host)
    demands = bundles(specs, session.resources, share)
    return stack.enter_context(launched(specs, demands, cores_apart=not share))


def _check_hosts(hosts: int, host: str, embedded: bool) -> None:
    if hosts > 1 and embedded:
        raise ConfigError(
            f"the Ray cluster has {hosts} hosts, which can't share an embedded Redis: start one and pass --redis-url"
        )
    if hosts > 1 and host not in WILDCARDS:
        raise ConfigError(
            f"the Ray cluster has {hosts} hosts: pass --host 0.0.0.0, so that their processes reach each other"
        )


def _wait_until_ready(cluster: Cluster, settings: ClusterSettings, state: ClusterState, console: Console) -> str:
    """Shows progress until all processes run and the endpoint uses all workers.

    Returns:
        The endpoint's URL: `state.url`, unless all routers are on other machines.

    Raises:
        CPDError: A process refuses to start, or keeps dying.
    """
    names = [spec.name for spec in cluster.specs]
    last_seen = dict.fromkeys(names, time.monotonic())
    with StartProgress(console, names) as progress:
        while True:
            leases = _leases(settings)
            pids = {member.id: member.pid for member in leases}
            waiting = 0
            for spec, process in zip(cluster.specs, cluster.states(), strict=True):
                if process:
                    last_seen[spec.name] = time.monotonic()
                elif time.monotonic() - last_seen[spec.name] > _SUPERVISOR_S:
                    raise CPDError(f"Ray has not started the supervisor of {spec.name} within {_SUPERVISOR_S:.0f} s")
                if process and process.error:
                    raise CPDError(f"{spec.name} on {process.host}: {process.error}")
                ready = process is not None and spec.has_leases(process.pid, pids)
                waiting += not ready
                progress.show(spec.name, process, ready)
                if process and process.pid is None and process.starts >= _STARTS:
                    raise CPDError(
                        f"{spec.name} has died {process.starts} times while starting, last with exit code"
                        f" {process.exit_code}; its last log lines are above"
                    )
            if name := dead_process():
                raise CPDError(f"Ray's {name} died while the cluster started")
            if not waiting:
                hosts = {member.host for member in leases if member.kind == "router"}
                url = state.url if socket.gethostname() in hosts else url_of(min(hosts), settings.port)
                workers = {name: pids[name] for spec in cluster.specs if spec.is_worker for name in spec.members}
                routers = [spec.name for spec in cluster.specs if not spec.is_worker]
                if has_workers(url, state.cluster_token, workers, routers):
                    return url
            time.sleep(_STARTING_POLL_S)


def _watch(cluster: Cluster, redis: EmbeddedRedis | None, console: Console) -> NoReturn:
    """Prints the processes' logs, and restarts Redis if it dies.

    Raises:
        CPDError: Ray has ended, and with it all processes.
    """
    starts = [1] * len(cluster.specs)
    drained = [False] * len(cluster.specs)
    warned = False
    while True:
        for index, state in enumerate(cluster.states()):
            if state is None:
                continue
            for line in state.lines:
                print_log(console, line)
            if state.exit_code == EXIT_DRAINED and not drained[index]:
                console.print(f"{cluster.specs[index].name} was drained and has ended")
            drained[index] = state.exit_code == EXIT_DRAINED
            if state.starts > starts[index]:
                console.print(f"{cluster.specs[index].name} ended with exit code {state.exit_code} and was restarted")
            starts[index] = state.starts
        dead = dead_process()
        if dead == RAYLET:
            raise CPDError("Ray's raylet died, and the cluster with it; start it again")
        if dead == GCS and not warned:
            warned = True
            console.print(
                "Ray's gcs_server died. The cluster goes on, but a supervisor that dies is no longer restarted: end the"
                " cluster with Ctrl-C when it suits, and start it again"
            )
        if redis and not redis.running:
            console.print("Redis died; restarting it")
            try:
                redis.start()
            except CPDError as error:  # the cluster goes on without Redis; the next iteration tries again
                console.print(str(error), markup=False)
        time.sleep(_RUNNING_POLL_S)


def _leases(settings: ClusterSettings) -> list[Member]:
    """Returns all members with a lease.

    Raises:
        ConfigError: Redis does not answer.
    """

    async def read() -> list[Member]:
        async with Redis.from_url(settings.redis_url) as redis:
            return await members(redis, settings.cluster)

    try:
        return asyncio.run(read())
    except (RedisError, OSError, ValueError) as error:
        address = settings.redis_url.rpartition("@")[2]  # without a password
        raise ConfigError(f"Redis at {address} does not answer: {error}") from None


def _interrupt_on_signals() -> None:
    """Makes SIGTERM and a closed terminal end the cluster as Ctrl-C does. Later signals are ignored."""

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        for name in _SIGNALS:
            signal.signal(name, signal.SIG_IGN)
        raise KeyboardInterrupt

    for name in _SIGNALS:
        signal.signal(name, interrupt)
