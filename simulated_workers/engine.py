"""Makes engines without a model."""

import time
from hashlib import blake2b
from typing import Protocol

from cpd.common.blocks import POOL_BYTES
from cpd.common.errors import ConfigError
from cpd.common.settings import EngineSettings, WorkerSettings
from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel, Profile
from engine.engine import Engine
from engine.model.config import ModelConfig
from kvtransfer.base import PoolMemory
from sim.device.runner import PAGE_BYTES, SimulatedRunner, VirtualTime, build_outline
from simulated_workers.simulation import SIMULATED
from worker.context import LoadedEngine
from worker.wire_format import Limits

CONTEXT = 32_768
"""Maximum tokens of prompt plus output, unless the settings say otherwise. The checkpoint's limit does not apply."""

_MIN_PAGES = 4


class Load(Protocol):
    """Makes a worker's engine on a device with the given clock."""

    def __call__(self, settings: WorkerSettings, clock: VirtualTime) -> LoadedEngine: ...


def page_bytes_of(profile: Profile, config: ModelConfig) -> int:
    """Size of a page of the simulated model: the profile's, or else the checkpoint's."""
    return profile.page_bytes or config.page_bytes("bfloat16")


def count_pages(settings: EngineSettings, profile: Profile, config: ModelConfig) -> int:
    """Number of pages in the pool of a simulated device.

    Raises:
        ConfigError: The settings ask for a pool that the device can't have.
    """
    if settings.host_kv_memory:
        raise ConfigError("--host-kv-memory: simulated workers have no pages to keep in host memory; leave it out")
    if profile.num_pages and settings.kv_memory is None:
        return profile.num_pages
    page_bytes = page_bytes_of(profile, config)
    kv_bytes = POOL_BYTES if settings.kv_memory is None else int(settings.kv_memory)
    least = _MIN_PAGES * page_bytes
    if kv_bytes < least:
        raise ConfigError(f"--kv-memory {kv_bytes} is too small for this model; give at least {least} bytes")
    return kv_bytes // page_bytes


def make_loader(profile: Profile, config: ModelConfig) -> Load:
    """Makes a function that makes engines on simulated devices.

    Args:
        profile: Says how long steps take. The engine predicts with it, too, unless its settings name another one.
        config: The config of the checkpoint whose tokenizer is used.
    """
    page_bytes = page_bytes_of(profile, config)
    fingerprint = blake2b(f"{SIMULATED} {config.vocab_size} {page_bytes}".encode(), digest_size=16).digest()

    def load(settings: WorkerSettings, clock: VirtualTime) -> LoadedEngine:
        if settings.device_memory is not None:
            raise ConfigError("--device-memory: simulated workers have no memory to share; leave it out")
        num_pages = count_pages(settings, profile, config)
        runner = SimulatedRunner(num_pages, PerfModel(profile), clock, config.vocab_size)
        known = Profile.load(settings.profile) if settings.profile else profile
        colocation = Colocation(
            PerfModel(known),
            token_budget=settings.token_budget,
            mode=settings.colocate,
            splits=[split.shares for split in runner.splits],
            itl_ms=settings.slo_itl,
        )
        engine = Engine(
            runner,
            max_model_len=settings.max_model_len or CONTEXT,
            colocation=colocation,
            max_num_seqs=settings.max_num_seqs,
            max_queue_tokens=settings.max_queue_tokens,
            max_wait_s=settings.max_wait_s,
            build=build_outline,
        )
        return LoadedEngine(
            engine=engine,
            memory=PoolMemory(runner.pool.ctypes.data, num_pages, PAGE_BYTES),
            page_bytes=page_bytes,
            limits=Limits(vocab_size=config.vocab_size, max_model_len=engine.max_model_len),
            fingerprint=fingerprint,
            dtype=SIMULATED,
            device=f"{profile.device}, {SIMULATED}",
            profile=known,
            token_budget=settings.token_budget,
            progress=time.monotonic,  # a simulated step goes on as long as time does
        )

    return load
