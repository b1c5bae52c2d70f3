"""Every call into NIXL. They block, most of them without the GIL, and belong on a thread of their own.

This uses the bindings below NIXL's Python API: the progress thread of that API polls all the time, which takes a
quarter of a core.
"""

import importlib
import os
import secrets
from types import ModuleType
from typing import Any

import numpy as np

from cpd.common.errors import TransferError
from kvtransfer import cuda
from kvtransfer.addresses import network_devices
from kvtransfer.base import PoolMemory
from kvtransfer.segments import Addresses

MODULES = ("nixl_cu13", "nixl_cu12")
_PROGRESS_US = 100_000  # UCX wakes the progress thread when there is something to do; this is for what it misses
_LOGGING = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_LOG_FILE": "stderr"}
_UCX = {
    "TLS": "^sm",
    # Otherwise GPUs of another machine might map the pool, and write after the agent is gone.
    "CUDA_IPC_ENABLE_MNNVL": "n",
}


def load() -> ModuleType:
    """NIXL's bindings.

    Raises:
        TransferError: NIXL is not installed, or does not work here.
    """
    for name, value in _LOGGING.items():  # NIXL and UCX read these once; their errors are raised anyway
        os.environ.setdefault(name, value)
    missing = ""
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError as error:
            missing = missing or str(error)
        except ImportError as error:
            raise TransferError(f"{name} does not load: {error}; reinstall it, or use --transport ucx") from None
    raise TransferError(f"NIXL is not installed ({missing}): pip install nixl-cu13, or use --transport ucx")


def options(host: str) -> dict[str, str]:
    """UCX configuration of an agent. UCX_TLS and UCX_NET_DEVICES of the environment take precedence.

    Args:
        host: IP address of the interface to use.
    """
    chosen = dict(_UCX)
    if devices := network_devices(host):
        chosen["NET_DEVICES"] = ",".join(devices)
        if ":" in host:
            chosen["TCP_AF_PRIO"] = "inet6,inet"  # of the addresses of an interface; by default the other way round
    return chosen


class Agent:
    """A NIXL agent over one pool, for one connection (implements `kvtransfer.nixl.writer.WriterBackend`).

    Use it only on the thread that creates it.

    Args:
        memory: The pool.
        ucx: UCX configuration, names without the prefix `UCX_`.
        progress: True for a progress thread, which a receiver needs.

    Raises:
        TransferError: NIXL cannot be set up.
    """

    def __init__(self, memory: PoolMemory, ucx: dict[str, str], *, progress: bool) -> None:
        self._nixl = load()
        self._errors = tuple(
            value for name, value in vars(self._nixl).items() if name.startswith("nixl") and name.endswith("Error")
        )
        self._memory = memory
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = progress
        config.pthrDelay = _PROGRESS_US
        if memory.device is not None:
            cuda.use(memory.device)
        for name, value in ucx.items():
            if "," in value:  # NIXL splits settings at commas; UCX reads its environment each time
                os.environ.setdefault(f"UCX_{name}", value)
        try:
            self._agent: Any = self._nixl.nixlAgent(secrets.token_hex(8), config)
            settings = ",".join(f"{name}={value}" for name, value in ucx.items() if "," not in value)
            self._backend = self._agent.createBackend("UCX", {"engine_config": settings})
            whole = (memory.pointer, memory.num_bytes, memory.device or 0, "")
            self._registered = self._nixl.nixlRegDList(self._memory_kind(memory), [whole])
            self._agent.registerMem(self._registered, [self._backend])
        except self._errors as error:
            self.close()
            raise TransferError(_explain(error)) from None

    def metadata(self) -> bytes:
        """What a peer needs to write into the pool."""
        data: bytes = self._agent.getLocalMD()
        return data

    def connect(self, metadata: bytes, pool: PoolMemory) -> None:
        """Connects to the agent with this metadata, to write into its pool.

        Raises:
            TransferError: It can't be reached; this agent is closed.
        """
        try:
            self._peer = self._agent.loadRemoteMD(metadata).decode()
            self._agent.makeConnection(self._peer, [self._backend])
            self._their_memory = pool
        except self._errors as error:
            self.close()
            raise TransferError(_explain(error)) from None

    def write(self, sources: Addresses, targets: Addresses, num_bytes: Addresses) -> int:
        own = self._descriptors(self._memory, sources, num_bytes)
        theirs = self._descriptors(self._their_memory, targets, num_bytes)
        try:
            handle: int = self._agent.createXferReq(self._nixl.NIXL_WRITE, own, theirs, self._peer, "", [self._backend])
            self._agent.postXferReq(handle)
        except self._errors as error:
            raise TransferError(_explain(error)) from None
        return handle

    def written(self, handle: int) -> bool:
        try:
            if self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return False
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            raise TransferError(_explain(error)) from None
        return True

    def close(self) -> None:
        """Destroys the agent: nothing is read or written through it any more.

        Raises:
            TransferError: The GPU doesn't answer.
        """
        self._agent = None
        if self._memory.device is not None:
            cuda.wait(self._memory.device)  # UCX does not wait for the copies that its streams have started

    def _descriptors(self, pool: PoolMemory, addresses: Addresses, num_bytes: Addresses) -> Any:
        """NIXL's list of pieces of a pool's memory."""
        pieces = np.stack([addresses, num_bytes, np.full_like(addresses, pool.device or 0)], axis=1)
        return self._nixl.nixlXferDList(self._memory_kind(pool), pieces)

    def _memory_kind(self, pool: PoolMemory) -> Any:
        return self._nixl.DRAM_SEG if pool.device is None else self._nixl.VRAM_SEG


def _explain(error: Exception) -> str:
    text = str(error)
    if "DISCONNECT" in text:
        return "the connection was reset: the peer is gone"
    return f"NIXL failed: {text}; UCX_LOG_LEVEL=warn says why"
