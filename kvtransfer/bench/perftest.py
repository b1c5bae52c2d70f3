"""UCX's own benchmark between the two hosts, as the upper bound of what a transport can reach."""

import asyncio
import importlib.util
import os
import shutil
from pathlib import Path

from cpd.common.errors import TransferError

_TEST = ("-t", "ucp_put_bw", "-s", str(256 << 20), "-n", "5", "-w", "1")
_MB = 1 << 20  # as ucx_perftest counts
_TIMEOUT_S = 60.0


def installed() -> bool:
    """True if this host has `ucx_perftest`."""
    return _program() is not None


def _program() -> Path | None:
    spec = importlib.util.find_spec("libucx")  # not imported: that would load a second UCX
    if spec is not None and spec.origin is not None:
        program = Path(spec.origin).parent / "bin" / "ucx_perftest"
        if program.exists():
            return program
    found = shutil.which("ucx_perftest")
    return Path(found) if found else None


def _environment(program: Path, tls: str) -> dict[str, str]:
    environment = os.environ | {"UCX_TLS": tls, "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "error"}
    libraries = program.parent.parent / "lib"
    return environment | ({"LD_LIBRARY_PATH": str(libraries)} if libraries.exists() else {})


async def serve(port: int, tls: str) -> asyncio.subprocess.Process:
    """Starts the receiver's half, which listens on `port`. It ends with the test, or is terminated by the caller.

    Raises:
        TransferError: ucx_perftest is not installed.
    """
    program = _program()
    if program is None:
        raise TransferError("ucx_perftest is not installed at the receiver")
    quiet = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        program, "-p", str(port), env=_environment(program, tls), stdout=quiet, stderr=quiet
    )


def command(tls: str) -> str:
    """The command that `put_bandwidth` runs."""
    return " ".join([f"UCX_TLS={tls} ucx_perftest", *_TEST])


async def put_bandwidth(host: str, port: int, tls: str) -> float:
    """Measures one-sided writes to the receiver, in bytes per second.

    Raises:
        TransferError: The test failed.
    """
    program = _program()
    if program is None:
        raise TransferError("ucx_perftest is not installed")
    deadline = asyncio.get_running_loop().time() + _TIMEOUT_S
    pipe = asyncio.subprocess.PIPE
    while True:
        client = await asyncio.create_subprocess_exec(
            program, host, "-p", str(port), *_TEST, "-f", env=_environment(program, tls), stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout_at(deadline):
                out, problem = await client.communicate()
        except TimeoutError:
            client.kill()
            await client.wait()
            raise TransferError(f"ucx_perftest took more than {_TIMEOUT_S:g} s") from None
        if client.returncode == 0:
            return float(out.split()[-3]) * _MB
        if asyncio.get_running_loop().time() > deadline - _TIMEOUT_S / 2:
            raise TransferError(f"ucx_perftest failed: {problem.decode().strip()}")
        await asyncio.sleep(0.05)  # the receiver's half does not listen yet
