"""How fast do NIXL and ucxx move pages between two processes on one GPU?

One process sends every page of a pool (plain cudaMalloc memory, like the engine's) to scattered pages of the other, in
pages of 0.25 to 2.25 MiB; the receiver checks every byte. NIXL writes one-sided; ucxx sends one message per page. A
transport without its package is skipped. `cpd bench transfer` measures the workers' own transport over NIXL as well,
also without UCX's cache of mapped memory, which keeps a killed worker's memory allocated.
"""

import multiprocessing
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scripts.gpu.common import CPD, MissingError
from scripts.gpu.results import Report
from scripts.gpu.transfer_peers import Peer, nixl_receiver, nixl_sender, ucxx_receiver, ucxx_sender

PAGE_BYTES = (256 << 10, 512 << 10, 1 << 20, 9 << 18)
POOL_BYTES = 9 << 26
"""576 MiB, a multiple of every page size."""
PATIENCE_S = 60.0

TRANSPORTS: Mapping[str, tuple[str, Peer, Peer]] = {
    "NIXL": ("nixl_cu13", nixl_receiver, nixl_sender),
    "ucxx": ("ucxx", ucxx_receiver, ucxx_sender),
}
"""(required module, receiver, sender) by name."""


class PeerError(Exception):
    """A peer process died or did not answer in time."""


@contextmanager
def _peer(target: Peer, device: str, size: int) -> Iterator[Connection]:
    """Runs a peer process and yields the parent's end of its pipe. Kills the process at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, device, size), daemon=True)
    process.start()
    theirs.close()  # so that reading ends when the peer dies
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _answer(pipe: Connection) -> Any:
    """The next message of a peer."""
    if not pipe.poll(PATIENCE_S):
        raise PeerError(f"no answer within {PATIENCE_S:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise PeerError("a process died; its log says why") from None


def transfer_seconds(
    receiver: Peer, sender: Peer, device: str, size: int, page_sizes: Sequence[int]
) -> Iterator[tuple[int, list[float], bool]]:
    """Moves a pool of `size` bytes in pages of each size.

    Yields:
        The page size, the seconds of each round, and whether every byte arrived.

    Raises:
        PeerError: A process died, or did not answer in time.
    """
    with _peer(receiver, device, size) as receiving, _peer(sender, device, size) as sending:
        sending.send(_answer(receiving))
        for page_bytes in page_sizes:
            receiving.send(page_bytes)
            sending.send(page_bytes)
            seconds = _answer(sending)
            receiving.send(page_bytes)
            yield page_bytes, seconds, _answer(receiving)


def measure(report: Report, device: str = "cuda", size: int = POOL_BYTES, pages: Sequence[int] = PAGE_BYTES) -> None:
    """Measures every transport whose package is installed.

    Raises:
        MissingError: None is installed.
    """
    found = {name: peers for name, (module, *peers) in TRANSPORTS.items() if find_spec(module) is not None}
    if not found:
        raise MissingError("neither NIXL nor ucxx is installed; carry the wheels of one, see docs/gpu-status.md")
    floor_gb_s = report.ceilings.copy_gb_s / 2
    for name, (receiver, sender) in found.items():
        try:
            for page_bytes, seconds, whole in transfer_seconds(receiver, sender, device, size, pages):
                label = f"{name}: pages of {page_bytes / 2**20:g} MiB"
                rate = size / statistics.median(seconds) / 1e9
                note = f"first round {size / seconds[0] / 1e9:.3g}; a copy on the device reaches {floor_gb_s:.0f}"
                report.add(label, rate, "GB/s", note=note)
                if not whole:
                    raise PeerError(f"pages of {page_bytes} bytes arrived damaged, or not at all")
        except (PeerError, OSError) as error:
            report.add(f"{name}: failed", None, "GB/s", note=str(error))
    if "NIXL" in found:
        own_transport(report, "CPD over NIXL", device, size, pages, {})
        own_transport(report, "CPD over NIXL, nothing stays mapped", device, size, pages, {"UCX_CUDA_IPC_CACHE": "n"})


def own_transport(
    report: Report, name: str, device: str, size: int, pages: Sequence[int], ucx: Mapping[str, str]
) -> None:
    """Measures the same pages over the workers' transport, with these environment variables."""
    from kvtransfer.bench.result import TransferResult

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "transfer.json"
        command = [*CPD, "bench", "transfer", "--transport", "nixl", "--device", device]
        command += ["--no-perftest", "--pool", str(size)]
        command += ["--json", str(file)]
        command += [argument for page_bytes in pages for argument in ("--page-size", str(page_bytes))]
        command += [argument for count in (1, size // max(pages)) for argument in ("--pages", str(count))]
        try:
            environment = {**os.environ, **ucx}
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
        except subprocess.TimeoutExpired:
            report.add(f"{name}: failed", None, "GB/s", note=f"no answer within {PATIENCE_S:.0f} s")
            return
        if done.returncode:
            report.add(f"{name}: failed", None, "GB/s", note=done.stderr.strip().rpartition("\n")[2])
            return
        result = TransferResult.model_validate_json(file.read_text())
    for cell in result.cells:
        label = f"{name}: {cell.pages} pages of {cell.page_bytes / 2**20:g} MiB"
        note = f"best {cell.best_bytes_per_s / 1e9:.3g}; median push {cell.median_ms:.3g} ms"
        report.add(label, cell.bytes_per_s / 1e9, "GB/s", note=note)


def run(report: Report) -> None:
    """Runs the experiment."""
    measure(report)
