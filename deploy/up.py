"""`cpd up`: checks the settings, starts a cluster, watches it, stops it.

Starts in this order, and stops in the reverse:
    runtime directory → Redis → Ray → placement group → supervising actors → processes
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

from rich.console import Console

from cpd.common.errors import ConfigError, CPDError
from cpd.common.membership import Member
from cpd.common.process import EXIT_DRAINED
from cpd.common.settings import NO_SHARED_GPU, ClusterSettings
from cpd.common.trust import ClusterSecret, cluster_secret
from cpd.performance.model import Profile
from cpd.performance.profiles import absolute_profile
from deploy.changes import SUPERVISOR_S, Changes, Plan, no_supervisor, start_error
from deploy.cluster import GROWTH_S, PLACEMENT_S, Cluster, launched
from deploy.cluster_status import has_workers, read_leases
from deploy.console import StartProgress, print_log, usage_hint
from deploy.control import control_socket
from deploy.detach import Detached, detach
from deploy.device_records import device_records
from deploy.endpoint import LOOPBACK, WILDCARDS, pick_port, url_of
from deploy.evening import evened_out
from deploy.logs import LAUNCHER, ClusterLog
from deploy.model import check_models, resolve_model
from deploy.placement import check_places, demand_of, gpu_share, local_resources
from deploy.planner import Bounds, ClusterPlanner, check_bounds, planning
from deploy.process import ProcessState
from deploy.processes import processes
from deploy.raydir import clear_ray_dir, make_ray_dir, protected
from deploy.redis import EmbeddedRedis, embedded_redis
from deploy.scaling import scaled_on_request
from deploy.session import GCS, RAYLET, check_hosts, dead_process, host_names, joined_ray, local_ray
from deploy.state import ClusterDir, ClusterState
from router.api.sampling import default_sampling
from router.api.tenants import read_keys
from router.placement.policies import make_policy
from router.server_certificate import certificate_files, server_context
from simulated_workers.simulation import NOTICE

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STARTING_POLL_S, _RUNNING_POLL_S = 0.25, 1.0


def up(settings: ClusterSettings) -> None:
    """Starts a cluster and runs it until Ctrl-C; with `detach` it goes on in the background when this has returned."""
    detached = detach() if settings.detach else None
    _interrupt_on_signals()
    console = Console(stderr=True)
    try:
        _run(settings, console, detached)
    except KeyboardInterrupt:
        console.print("Stopped.")


def _run(settings: ClusterSettings, console: Console, detached: Detached | None) -> None:
    directory = ClusterDir(settings.cluster)
    with contextlib.ExitStack() as stack:
        stack.enter_context(directory.hold())
        directory.write(ClusterState(settings.cluster, os.getpid()))
        output = stack.enter_context(_Output(settings.cluster, console))
        given = settings.reload()
        settings = _checked(settings, console)
        has_own_secret = settings.secret_file is not None
        if settings.secret_file is None:
            settings = settings.model_copy(update={"secret_file": directory.make_secret()})
        secret = cluster_secret(settings)
        own_url = url_of(settings.host, settings.port, tls=settings.tls_cert is not None)
        state = ClusterState(
            cluster=settings.cluster,
            pid=os.getpid(),
            url=own_url,
            ray_dir="" if settings.ray_address else make_ray_dir(),
            admin_key=secret.admin_key,
            launch=secrets.token_hex(16),
            secret_file=str(settings.secret_file),
        )
        if state.ray_dir:
            stack.callback(clear_ray_dir, state.ray_dir)
            stack.enter_context(protected(state.ray_dir))
        directory.write(state)

        redis = None
        if not settings.redis_url:
            redis = stack.enter_context(embedded_redis(directory.redis_socket))
            settings = settings.model_copy(update={"redis_url": redis.url})
        read_leases(settings.redis_url, settings.cluster, secret)
        with console.status("Starting Ray" if state.ray_dir else "Joining Ray"):
            cluster, plan = _launch(
                given, settings, state, stack, output, embedded=redis is not None, has_own_secret=has_own_secret
            )
        state = _wait_until_ready(cluster, settings, secret, state, output)
        directory.write(state)
        name = "" if settings.cluster == "default" else f" --cluster {settings.cluster}"
        stop = f"Logs: `cpd logs -f{name}`    Stop: {'' if detached else 'Ctrl-C or '}`cpd down{name}`"
        names = [one.served_model_name for one in settings.each_model()]
        hint = usage_hint(state.url, names, bool(settings.api_key or settings.api_key_file), stop)
        if detached:
            detached.ready(hint)
        else:
            sys.stdout.write(hint)
            sys.stdout.flush()
        leases = partial(read_leases, settings.redis_url, settings.cluster, secret)
        changes = Changes(cluster, plan, state, leases, prepared)
        named, busy = {"scale": changes.scale, "restart": changes.restart}, threading.Lock()
        stack.enter_context(control_socket(directory.control_socket, named, busy, output.say))
        stack.enter_context(scaled_on_request(settings.redis_url, settings.cluster, secret, changes, busy, output.say))
        if settings.ray_address:
            stack.enter_context(evened_out(cluster, changes, busy, output.say))
        if settings.planner != "off":
            bounds = None
            if settings.max_workers:
                resize = partial(changes.resize, tell=output.say)
                bounds = Bounds(settings.min_workers, settings.max_workers, resize)
            planner = ClusterPlanner(
                settings.planner, settings.redis_url, settings.cluster, secret, busy, output.say, bounds
            )
            stack.enter_context(planning(planner))

        def find(routers: Collection[str]) -> bool:
            found = [member for member in leases() if member.id in routers]
            if found:
                changes.state = _reached_at(found, state, own_url, settings)
                directory.write(changes.state)
            return len(found) == len(routers)

        _watch(cluster, redis, directory, find, output)


class _Output:
    """The lines of all processes and of `cpd up`, in the terminal and in the cluster's log."""

    def __init__(self, cluster: str, console: Console) -> None:
        self.console = console
        self._log = ClusterLog(cluster)

    def __enter__(self) -> Self:
        self._log.write(LAUNCHER, [f"cpd up starts as process {os.getpid()}"])
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            self._log.write(LAUNCHER, ["stopped"])
        elif isinstance(error, CPDError):
            self._log.write(LAUNCHER, [f"error: {error}"])
        else:
            self._log.write(LAUNCHER, "".join(traceback.format_exception(error)).splitlines())
        self._log.close()

    def log(self, name: str, lines: Sequence[str]) -> None:
        """Writes lines to the log only."""
        self._log.write(name, lines)

    def show(self, name: str, lines: Sequence[str]) -> None:
        """Writes lines of a process unchanged."""
        self._log.write(name, lines)
        with contextlib.suppress(OSError):  # its terminal is closed
            if lines:
                print_log(self.console, "\n".join(lines))

    def say(self, text: str) -> None:
        """Writes a sentence of `cpd up`."""
        self._log.write(LAUNCHER, [text])
        with contextlib.suppress(OSError):
            self.console.print(text, markup=False)


def _checked(settings: ClusterSettings, console: Console) -> ClusterSettings:
    """Returns the settings with all values filled in on which the processes must agree.

    Raises:
        CheckpointError, ConfigError: The cluster cannot run with these settings.
    """
    check_bounds(settings)
    port = pick_port(settings.host, settings.port)
    settings = prepared(settings)
    given = [one.model for one in settings.each_model()]
    directories = {model: str(resolve_model(model)) for model in given}
    models = _with_models(settings, directories).each_model()
    with console.status(f"Checking {', '.join(directories.values())}"):
        device = check_models(models)
    if settings.simulate:
        console.print(NOTICE)
    for one in models:
        if sampling := default_sampling(Path(one.model), settings.sampling_defaults):
            shown = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
            of = f" of {one.served_model_name}" if settings.models else ""
            console.print(f"Default sampling{of}, from the model's generation_config.json: {shown}", soft_wrap=True)
    paths = {model: Path(model).expanduser() for model in given}
    ids = {model for model, path in paths.items() if not path.exists()}
    for_all = directories
    if settings.ray_address:  # each machine has its own directory of a download or a GGUF file
        files = {model: str(path.absolute()) for model, path in paths.items() if path.is_file()}
        for_all = {**directories, **{model: model for model in ids}, **files}
    own_name = settings.model if settings.model in ids else Path(models[0].model).name
    return _with_models(settings, for_all).model_copy(
        update={
            "port": port,
            "device": device,
            "served_model_name": "" if settings.models else settings.served_model_name or own_name,
            "secret_file": settings.secret_file and settings.secret_file.resolve(),
        }
    )


def _with_models(settings: ClusterSettings, places: Mapping[str, str]) -> ClusterSettings:
    """Returns the settings with other names of the checkpoints, by those that they have."""
    if not settings.models:
        return settings.model_copy(update={"model": places[settings.model]})
    models = [one.model_copy(update={"model": places[one.model]}) for one in settings.models]
    return settings.model_copy(update={"models": models})


def prepared(settings: ClusterSettings) -> ClusterSettings:
    """Checks the files, the policy and the models that the settings name, and makes paths absolute.

    Raises:
        ConfigError: One of them is missing or wrong.
    """
    settings.check_models()
    for profile in filter(None, (settings.profile, settings.simulate)):
        Profile.load(profile)
    make_policy(settings.policy)
    if settings.api_key_file:
        read_keys(settings.api_key_file, [name for one in settings.models for name in one.names] or None)
    if pair := certificate_files(settings.tls_cert, settings.tls_key):
        server_context(*pair)
    return settings.model_copy(
        update={
            "profile": absolute_profile(settings.profile),
            "api_key_file": settings.api_key_file and settings.api_key_file.resolve(),
            "tls_cert": settings.tls_cert and settings.tls_cert.resolve(),
            "tls_key": settings.tls_key and settings.tls_key.resolve(),
            "simulate": absolute_profile(settings.simulate),
        }
    )


def _launch(
    given: ClusterSettings,
    settings: ClusterSettings,
    state: ClusterState,
    stack: contextlib.ExitStack,
    output: _Output,
    *,
    embedded: bool,
    has_own_secret: bool,
) -> tuple[Cluster, Plan]:
    """Starts or joins Ray and starts the processes there; `stack` ends them."""
    namespace = f"cpd-{settings.cluster}"
    if state.ray_dir:
        session = stack.enter_context(local_ray(namespace, f"{state.ray_dir}/ray", local_resources()))
    else:
        session = stack.enter_context(joined_ray(namespace, settings.ray_address))
        check_hosts(session, settings, embedded=embedded, has_own_secret=has_own_secret)
    _interrupt_on_signals()  # Ray has set its own handlers
    workers = sum(one.combined + one.prefill for one in settings.each_model())
    share = gpu_share(settings.device, workers, session.gpus, growing=session.grows)
    if 0 < share < 1:
        output.console.print(
            f"{workers} workers share {session.gpus:g} GPUs, each with its own copy of the weights; for one worker per"
            f" GPU use --prefill 0 --combined {session.gpus:g}",
            soft_wrap=True,
        )
    if settings.device_memory is not None:
        if share:
            raise ConfigError(NO_SHARED_GPU)
        stack.enter_context(
            device_records(
                settings.redis_url, settings.cluster, cluster_secret(settings), settings.device_memory, host_names
            )
        )
    # Not "auto": a worker that cannot use its GPU must fail, not compute on the CPU.
    settings = settings.model_copy(
        update={"device": "cuda" if share else "cpu", "gpu_memory": settings.gpu_memory * (share or 1)}
    )
    # Hosts may join a Ray of your own later; their processes must reach the workers here.
    worker_host = LOOPBACK if state.ray_dir or settings.host not in WILDCARDS else settings.host
    plan = Plan(given, settings, worker_host, share, state.launch)
    specs = [plan.marked(spec) for spec in processes(settings, worker_host)]
    check_places(specs, session.resources)
    cluster = stack.enter_context(
        launched(
            specs,
            lambda spec: demand_of(spec, session.resources, share, shared_device=settings.device_memory is not None),
            not share and settings.device_memory is None,
            output.say,
            GROWTH_S if session.grows else PLACEMENT_S,
        )
    )
    return cluster, plan


def _wait_until_ready(
    cluster: Cluster, settings: ClusterSettings, secret: ClusterSecret, state: ClusterState, output: _Output
) -> ClusterState:
    """Shows progress until all processes run and the routers use all workers.

    Returns:
        `state`, with another URL if all routers are on other machines.

    Raises:
        CPDError: A process refuses to start, or keeps dying.
    """
    specs = cluster.specs
    names = [spec.name for spec in specs]
    last_seen = dict.fromkeys(names, time.monotonic())
    with StartProgress(output.console, names) as progress:
        while True:
            leases = read_leases(settings.redis_url, settings.cluster, secret)
            pids = {member.id: member.pid for member in leases}
            waiting = 0
            states = cluster.states()
            for spec in specs:
                process = states.get(spec.name)
                if process:
                    last_seen[spec.name] = time.monotonic()
                    output.log(spec.name, process.lines)
                elif time.monotonic() - last_seen[spec.name] > SUPERVISOR_S:
                    raise CPDError(no_supervisor(spec))
                if error := start_error(spec, process):
                    raise CPDError(error)
                ready = process is not None and spec.has_leases(process.pid, pids)
                waiting += not ready
                progress.show(spec.name, process, ready)
            if name := dead_process():
                raise CPDError(f"Ray's {name} died while the cluster started")
            if not waiting:
                found = [member for member in leases if member.kind == "router"]
                reached = _reached_at(found, state, state.url, settings)
                workers = {name: pids[name] for spec in specs if spec.is_worker for name in spec.members}
                routers = [spec.name for spec in specs if not spec.is_worker]
                if has_workers(reached, workers, routers):
                    return reached
            time.sleep(_STARTING_POLL_S)


def _reached_at(routers: Sequence[Member], state: ClusterState, own: str, settings: ClusterSettings) -> ClusterState:
    """Returns `state` with the URL of one of these routers: `own` if one runs on this machine."""
    if socket.gethostname() in {router.host for router in routers}:
        return replace(state, url=own, redis_url="")
    url = f"{'https' if settings.tls_cert else 'http'}://{min(router.address for router in routers)}"
    return replace(state, url=url, redis_url=settings.redis_url)


class _TriedAgain:
    """A step of each round of `_watch`. A failure is said once; the next round tries again."""

    def __init__(self, output: _Output, directory: ClusterDir) -> None:
        self._output = output
        self._path = directory.path
        self.failure = ""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        failure = ""
        if isinstance(error, OSError):
            failure = f"{self._path} can't be written: {error.strerror}"
        elif isinstance(error, CPDError):
            failure = str(error)
        if failure and failure != self.failure:
            self._output.say(f"{failure}. The cluster goes on, and this is tried again")
        self.failure = failure
        return bool(failure)


def _watch(
    cluster: Cluster,
    redis: EmbeddedRedis | None,
    directory: ClusterDir,
    find: Callable[[Collection[str]], bool],
    output: _Output,
) -> NoReturn:
    """Prints the processes' logs, says what is lost, and restarts Redis if it dies.

    Args:
        find: Finds out where these routers are, from their leases; returns whether all have one.

    Raises:
        CPDError: Ray has ended, and with it all processes.
    """
    starts: dict[str, int] = {}
    drained: set[str] = set()
    written: set[str] = set()
    lost: dict[str, str] = {}
    hosts: dict[str, str] = {}
    missing: dict[str, str] = {}
    routers = {spec.name for spec in cluster.specs if not spec.is_worker}
    warned = False
    files, redis_start = _TriedAgain(output, directory), _TriedAgain(output, directory)
    while True:
        states = cluster.states()
        for name, lines in cluster.last_lines():
            output.show(name, lines)
        for name, state in states.items():
            if state is None:
                continue
            output.show(name, state.lines)
            if state.exit_code == EXIT_DRAINED and name not in drained:
                output.say(f"{name} was drained and has ended")
                drained.add(name)
            if state.starts > starts.get(name, 1):
                output.say(f"{name} ended with exit code {state.exit_code} and was restarted")
            starts[name] = max(1, state.starts)  # 0: a new supervisor is about to start its process
            if state.pid:
                drained.discard(name)  # it was started again
                written.discard(name)
                moved = hosts.get(name, state.host) != state.host  # before it was known to be lost, if Ray is quick
                if lost.pop(name, None) or moved:
                    output.say(f"{name} runs again, on {state.host}")
                hosts[name] = state.host
        now_lost = cluster.lost()
        for reason in dict.fromkeys(now_lost.values()):
            if new := [name for name, why in now_lost.items() if why == reason and lost.get(name) != reason]:
                output.say(f"{', '.join(new)}: {reason}")
        names = {spec.name for spec in cluster.specs}
        lost = {name: reason for name, reason in (lost | now_lost).items() if name in names}
        hosts = {name: host for name, host in hosts.items() if name in names}
        now_missing = {**_not_running(states), **lost}
        now_routers = {spec.name for spec in cluster.specs if not spec.is_worker} - lost.keys() - drained
        with files:
            for name in sorted(drained - written):
                directory.add_drained(name)  # perhaps not by `cpd drain`
                written.add(name)
            if now_missing != missing:
                directory.write_missing(now_missing)
                missing = now_missing
            with contextlib.suppress(CPDError):  # Redis does not answer: the next iteration tries again
                if now_routers != routers and find(now_routers):
                    routers = now_routers
        dead = dead_process()
        if dead == RAYLET:
            raise CPDError("Ray's raylet died, and the cluster with it; start it again")
        if dead == GCS and not warned:
            warned = True
            output.say(
                "Ray's gcs_server died. The cluster goes on, but a supervisor that dies is no longer restarted: end the"
                " cluster with Ctrl-C when it suits, and start it again"
            )
        if redis and not redis.running:
            if not redis_start.failure:
                output.say("Redis died; restarting it")
            with redis_start:
                redis.start()
        time.sleep(_RUNNING_POLL_S)


def _not_running(states: Mapping[str, ProcessState | None]) -> dict[str, str]:
    """Returns why processes do not run, by name, but for those that were drained."""
    return {
        name: state.error
        or (f"ended with exit code {state.exit_code}; it starts again" if state.starts else "starting")
        for name, state in states.items()
        if state and state.pid is None and state.exit_code != EXIT_DRAINED
    }


def _interrupt_on_signals() -> None:
    """Makes SIGTERM and a closed terminal end the cluster as Ctrl-C does. Later signals are ignored.

    A SIGHUP that is ignored already, by `nohup` or a detached start, stays ignored.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        for name in _SIGNALS:
            signal.signal(name, signal.SIG_IGN)
        raise KeyboardInterrupt

    for name in _SIGNALS:
        if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:
            signal.signal(name, interrupt)
