"""Runs batches with torch: owns the weights and the KV pool of one device."""

import contextlib
import logging
import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.execution.cpu.lanes import CallerLane, make_splits
from engine.execution.device import resolve_device
from engine.execution.executor import Lane, Split
from engine.execution.host_memory import CpuHostMemory, TorchHostMemory
from engine.execution.memory_limits import check_host_memory, check_memory, default_pool
from engine.execution.memory_plan import count_slots, fit
from engine.execution.model_step import Steps
from engine.execution.sampling.sampler import Sampler
from engine.model.config import load_config
from engine.model.decoder import Decoder
from engine.model.weights import Checkpoint, model_fingerprint
from engine.ops import make_ops
from engine.ops.base import Heads

log = logging.getLogger(__name__)


class TorchRunner:
    """See `engine.execution.executor.Executor`. Used by one thread at a time; on a CPU, the lanes share
    torch's threads of its maker.

    Attributes:
        config: With `max_model_len` as it is served.
        dtype: Of weights and KV pool.
        num_pages: Pages of the pool.
        page_bytes: Size of one.
        pool: [num_pages, layers, 2, Hkv, BLOCK_SIZE, D]
        kernels: Whose compute, for people.
        fingerprint: Equal on workers that can exchange pages.
        full, splits: See `engine.execution.executor.Executor`.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        device: str,
        kv_bytes: int | None,
        max_model_len: int,
        gpu_memory: float = 1.0,
        max_num_seqs: int = 128,
        graphs: bool = True,
        lanes: bool = True,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Loads a checkpoint. All that can be wrong with it is found before the weights are read.

        Args:
            model_dir: Directory with config.json and safetensors.
            dtype: float32, bfloat16, float16, or auto for the checkpoint's own.
            device: cpu, cuda, or auto for a GPU if there is one.
            kv_bytes: Size of the KV pool; None: see `engine.execution.memory_limits.default_pool`.
            max_model_len: Longest prompt plus output; 0 for the checkpoint's limit.
            gpu_memory: Part of a GPU's memory that the runner may take, where `kv_bytes` doesn't tell.
            max_num_seqs: Sequences of one step.
            graphs: Whether a GPU captures decodes of up to so many sequences as graphs.
            lanes: Whether to prepare splits.
            on_progress: Called with what is going on and the fraction done.

        Raises:
            CheckpointError: The directory cannot be served.
            ConfigError: The settings do not fit the checkpoint or the machine.
            RuntimeError: CUDA's own errors; see `engine.execution.device.gpu_errors_said`.
        """
        config = load_config(model_dir)
        with Checkpoint(model_dir) as checkpoint:
            fitted = fit(config, checkpoint, dtype=dtype, max_model_len=max_model_len)
            self.dtype, self.page_bytes = fitted.dtype, fitted.page_bytes
            self._device = resolve_device(device)
            if kv_bytes is None:
                kv_bytes = default_pool(self._device, fitted.weight_bytes, fitted.page_bytes, gpu_memory)
            config, self.num_pages = fitted.in_pool(kv_bytes)
            self.config = config
            check_memory(self._device, fitted.weight_bytes, kv_bytes)
            if unused := checkpoint.unused(fitted.tensors):
                log.warning("%d tensors of %s are not used, such as %s", len(unused), model_dir, unused[0])
            self.fingerprint = model_fingerprint(model_dir, config, self.dtype)
            torch_dtype: torch.dtype = getattr(torch, self.dtype)
            progress = on_progress or (lambda _what, _fraction: None)
            heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
            with torch.inference_mode():
                progress("preparing kernels", 0.0)  # the first time that takes minutes on a GPU
                ops = make_ops(self._device, torch_dtype, heads, max_num_seqs)
                progress("preparing kernels", 1.0)
                self.kernels = ops.kernels
                self._model = model = Decoder(
                    self.config,
                    checkpoint,
                    ops,
                    torch_dtype,
                    self._device,
                    lambda fraction: progress("loading weights", fraction),
                )
        self._most_seqs = max_num_seqs
        sampler = Sampler(config.vocab_size, self._device)
        self.full: Lane
        self.splits: Sequence[Split]
        if self._device.type == "cuda":
            from engine.execution.cuda.setup import make_lanes

            pool = _zeros((self.num_pages + 1, *config.page_shape), torch_dtype, self._device)
            self._cuda = make_lanes(
                model,
                ops,
                sampler,
                pool,
                max_model_len=config.max_model_len,
                most_decodes=max_num_seqs if graphs else 0,
                split=lanes,
                on_progress=progress,
            )
            self.pool = pool[: self.num_pages]  # the last page is for the padding of captured decodes
            self.full, self.splits = self._cuda.full, self._cuda.splits
            self._copy_page = self._cuda.copies.copy
        else:
            self.pool = _zeros((self.num_pages, *config.page_shape), torch_dtype, self._device)
            kv = [self.pool[:, layer] for layer in range(config.num_layers)]
            steps, cores = Steps(model, kv, sampler, self._device), torch.get_num_threads()
            self.full = CallerLane(steps, cores)
            aside = Steps(model.beside(), kv, sampler, self._device)
            self.splits = make_splits(steps, aside, cores) if lanes else []
            self._copy_page = self._copy_on_cpu

    def warm_up(self, most_tokens: int) -> None:
        """Has a GPU compute the largest steps that there will be, so that its memory is enough now or never.

        Args:
            most_tokens: Of one step.
        """
        if self._device.type == "cuda":
            from engine.execution.cuda.warm_up import run_largest

            run_largest(self.full, most_tokens, self._most_seqs, self.config.max_model_len, self.num_pages)

    def progress(self) -> int:
        """Grows while a step is computed, on a CPU with each of its layers. Any thread may ask."""
        return self._model.progress

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page's keys and values of all layers."""
        self._copy_page(source, target)

    def settle(self) -> None:
        """See `engine.execution.executor.Executor`."""
        if self._device.type == "cuda":
            self._cuda.copies.settle()

    def host_memory(self, host_bytes: int, *, checksums: bool) -> TorchHostMemory:
        """Memory for pages that the pool evicts. To be called before the pool is used: copies are timed.

        Raises:
            ConfigError: It would hold no page, or there is not so much memory.
        """
        num_slots = count_slots(host_bytes, self.page_bytes)
        check_host_memory(host_bytes)
        shape = (num_slots, *self.config.page_shape)
        slots = _zeros(shape, self.pool.dtype, torch.device("cpu"))
        if self._device.type == "cuda":
            from engine.execution.cuda.host_memory import CudaHostMemory, pin

            return CudaHostMemory(self.pool, pin(slots), self._cuda.copies, checksums=checksums)
        return CpuHostMemory(self.pool, slots, checksums=checksums)

    def _copy_on_cpu(self, source: int, target: int) -> None:
        self.pool[target].copy_(self.pool[source])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the memory is page-aligned and all there from now on: the first write to a page would hold up a step."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # systems that have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape).zero_()
