"""Every call into NIXL. They block, most of them without the GIL, and belong on a thread of their own.

This uses the bindings below NIXL's Python API, which has a progress thread only at a quarter of a core, polling.
"""

import importlib
import os
import secrets
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpd.common.errors import TransferError
from kvtransfer import cuda
from kvtransfer.addresses import network_devices
from kvtransfer.base import PoolMemory
from kvtransfer.nixl.writer import Pages

MODULES = ("nixl_cu13", "nixl_cu12")
_PROGRESS_US = 100_000  # UCX wakes the progress thread when there is something; this is for what it misses
_LOGGING = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_LOG_FILE": "stderr"}
_UCX = {
    "TLS": "^sm",
    "CUDA_IPC_ENABLE_MNNVL": "n",  # else GPUs of another machine might map the pool, and write when the agent is gone
}

Handle = int


def load() -> ModuleType:
    """NIXL's bindings.

    Raises:
        TransferError: It is not installed, or does not work here.
    """
    for name, value in _LOGGING.items():  # NIXL and UCX read these once; what they have to say reaches us as errors
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
    """UCX configuration of an agent. UCX_TLS and UCX_NET_DEVICES of the environment win.

    Args:
        host: IPv4 address of the interface to use.
    """
    devices = network_devices(host)
    return _UCX | ({"NET_DEVICES": ",".join(devices)} if devices else {})


class Agent:
    """A NIXL agent over one pool, for one connection (implements `kvtransfer.nixl.writer.Door`).

    For the thread that makes it.

    Args:
        memory: The pool.
        ucx: UCX configuration, names without the prefix `UCX_`.
        progress: Whether UCX moves on its own here: needed where others write.

    Raises:
        TransferError: NIXL cannot be set up.
    """

    def __init__(self, memory: PoolMemory, ucx: dict[str, str], *, progress: bool) -> None:
        self._nixl = load()
        self._errors = tuple(
            value for name, value in vars(self._nixl).items() if name.startswith("nixl") and name.endswith("Error")
        )
        self._memory = memory
        self._lists: list[Handle] = []
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = progress
        config.pthrDelay = _PROGRESS_US
        if memory.device is not None:
            cuda.use(memory.device)
        for name, value in ucx.items():
            if "," in value:  # which NIXL can't tell from those between settings; UCX reads its environment each time
                os.environ.setdefault(f"UCX_{name}", value)
        try:
            self._agent: Any = self._nixl.nixlAgent(secrets.token_hex(8), config)
            settings = ",".join(f"{name}={value}" for name, value in ucx.items() if "," not in value)
            self._backend = self._agent.createBackend("UCX", {"engine_config": settings})
            whole = (memory.pointer, memory.num_bytes, memory.device or 0, "")
            self._registered = self._nixl.nixlRegDList(self._segment(memory), [whole])
            self._agent.registerMem(self._registered, [self._backend])
        except self._errors as error:
            self.close()
            raise TransferError(_advice(error)) from None

    def metadata(self) -> bytes:
        """What a peer needs to write into the pool."""
        data: bytes = self._agent.getLocalMD()
        return data

    def connect(self, metadata: bytes, pool: PoolMemory) -> None:
        """Makes ready to write into the pool of the agent with this metadata.

        Raises:
            TransferError: It can't be reached; this one is closed.
        """
        try:
            name = self._agent.loadRemoteMD(metadata).decode()
            self._agent.makeConnection(name, [self._backend])
            self._own = self._prepare(self._nixl.NIXL_INIT_AGENT, self._memory)
            self._theirs = self._prepare(name, pool)
        except self._errors as error:
            self.close()
            raise TransferError(_advice(error)) from None

    def _prepare(self, name: str, pool: PoolMemory) -> Handle:
        """NIXL's list of a pool's pages."""
        pages = np.empty((pool.num_pages, 3), np.uint64)
        pages[:, 0] = pool.pointer + np.arange(pool.num_pages, dtype=np.uint64) * np.uint64(pool.page_bytes)
        pages[:, 1:] = pool.page_bytes, pool.device or 0
        descriptors = self._nixl.nixlXferDList(self._segment(pool), pages)
        handle: Handle = self._agent.prepXferDlist(name, descriptors, [self._backend])
        self._lists.append(handle)
        return handle

    def _segment(self, pool: PoolMemory) -> Any:
        """NIXL's name for the kind of memory."""
        return self._nixl.DRAM_SEG if pool.device is None else self._nixl.VRAM_SEG

    def write(self, own: Pages, theirs: Pages, counts: Pages) -> Handle:
        """Begins to write. Ask `written` for the end.

        Raises:
            TransferError: The peer is gone.
        """
        try:
            handle: Handle = self._agent.makeXferReq(
                self._nixl.NIXL_WRITE,
                self._own,
                _spread(own, counts),
                self._theirs,
                _spread(theirs, counts),
                "",
                [self._backend],
            )
            self._agent.postXferReq(handle)
        except self._errors as error:
            raise TransferError(_advice(error)) from None
        return handle

    def written(self, handle: Handle) -> bool:
        """Whether all of it has arrived; then the handle is used up.

        Raises:
            TransferError: The peer is gone.
        """
        try:
            if self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return False
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            raise TransferError(_advice(error)) from None
        return True

    def close(self) -> None:
        """Destroys the agent: nothing is read or written through it any more.

        Raises:
            TransferError: The GPU doesn't tell.
        """
        self._agent = None
        if self._memory.device is not None:
            cuda.wait(self._memory.device)  # UCX leaves behind the copies that its streams have begun


def _spread(first: Pages, counts: Pages) -> NDArray[np.int32]:
    """The pages of runs: first[k], first[k] + 1, …, `counts[k]` of them."""
    ends = np.cumsum(counts)
    return (np.repeat(first - ends + counts, counts) + np.arange(ends[-1])).astype(np.int32)


def _advice(error: Exception) -> str:
    text = str(error)
    if "DISCONNECT" in text:
        return "the connection was reset: the peer is gone"
    return f"NIXL failed: {text}; UCX_LOG_LEVEL=warn says why"
