"""Runs batches with torch. Owns the weights and the KV pool of one device."""

import logging
import math
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Literal

import torch

from cpd.common.errors import ConfigError
from engine.execution.cpu.lanes import CallerLane, make_splits
from engine.execution.cpu.model_memory import ModelMemory
from engine.execution.cpu.system_memory import own
from engine.execution.executor import Lane, Split
from engine.execution.host_memory import CpuHostMemory, TorchHostMemory
from engine.execution.memory_limits import check_host_memory, check_memory, default_pool
from engine.execution.memory_plan import count_slots, plan_memory
from engine.execution.model_step import ModelStep
from engine.execution.sampling.sampler import Sampler
from engine.execution.torch_device import resolve_device
from engine.model.checkpoint import open_checkpoint
from engine.model.config import Quantization, load_config
from engine.model.decoder import Decoder
from engine.model.fingerprint import model_fingerprint
from engine.ops import make_ops
from engine.ops.base import Heads

log = logging.getLogger(__name__)


class TorchRunner:
    """An `engine.execution.executor.Executor`. Used by one thread at a time.

    Attributes:
        config: Model configuration; its `max_model_len` is the one served.
        dtype: Types of activations and weights, for people.
        num_pages: Pages in the pool.
        page_bytes: Bytes of one page.
        pool: [num_pages, layers, 2, Hkv, BLOCK_SIZE, D], of the KV type; in int8 [.., Hkv, bytes of a head], of bytes.
        kernels: Description of the kernels in use.
        fingerprint: Equal on workers that can exchange pages.
        full, splits: See `Executor`.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        device: str,
        kv_bytes: int | None,
        max_model_len: int,
        quantization: Quantization = "none",
        kv_dtype: Literal["auto", "int8"] = "auto",
        gpu_memory: float = 1.0,
        max_num_seqs: int = 128,
        graphs: bool = True,
        lanes: bool = True,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Loads a checkpoint. Every error in it is found before the weights are read.

        Args:
            model_dir: Directory with config.json and safetensors.
            dtype: float32, bfloat16, float16, or auto for the checkpoint's own.
            device: cpu, cuda, or auto for a GPU if there is one.
            kv_bytes: Bytes of the KV pool; None for `engine.execution.memory_limits.default_pool`.
            max_model_len: Longest prompt plus output in tokens; 0 for the checkpoint's limit.
            quantization: How to quantise the weights of linear layers.
            kv_dtype: Type of keys and values in pages; auto for `dtype`.
            gpu_memory: Share of a GPU's memory that the runner may use, if `kv_bytes` is None.
            max_num_seqs: Most sequences in one step.
            graphs: True to capture a GPU's decode steps as CUDA graphs.
            lanes: True to prepare splits.
            on_progress: Called with the current task and the fraction of it that is done.

        Raises:
            CheckpointError: The directory cannot be served.
            ConfigError: The settings do not fit the checkpoint or the machine.
            RuntimeError: An error of CUDA; see `engine.execution.torch_device.explain_gpu_errors`.
        """
        self._model_dir = model_dir
        config = load_config(model_dir)
        with open_checkpoint(model_dir, config) as checkpoint:
            plan = plan_memory(
                config,
                checkpoint,
                dtype=dtype,
                quantization=quantization,
                max_model_len=max_model_len,
                kv_dtype=kv_dtype,
            )
            self._tensors = plan.tensors
            self.dtype, self.page_bytes = plan.types, plan.page_bytes
            torch_dtype: torch.dtype = getattr(torch, plan.dtype)
            in_pages = torch.uint8 if plan.kv_dtype == "int8" else torch_dtype
            page_shape = config.page_shape(plan.kv_dtype)
            self._device = resolve_device(device)
            plan.check_device(self._device)
            if kv_bytes is None:
                kv_bytes = default_pool(self._device, plan.weight_bytes, plan.page_bytes, gpu_memory)
            self.config, self.num_pages = config, _ = plan.in_pool(kv_bytes)
            check_memory(self._device, plan.weight_bytes, kv_bytes)
            if unused := checkpoint.unused(plan.tensors):
                log.warning("%d tensors of %s are not used, such as %s", len(unused), model_dir, unused[0])
            self.fingerprint = model_fingerprint(model_dir, config, plan.dtype, plan.kv_dtype, quantization)
            progress = on_progress or (lambda _what, _fraction: None)
            heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.has_windows)
            with torch.inference_mode():
                progress("preparing kernels", 0.0)  # takes minutes the first time on a GPU
                ops = make_ops(self._device, torch_dtype, heads, max_num_seqs, plan.needs_kernels)
                progress("preparing kernels", 1.0)
                self.kernels = ops.kernels
                self._model = model = Decoder(
                    config,
                    checkpoint,
                    ops,
                    torch_dtype,
                    self._device,
                    lambda fraction: progress("loading weights", fraction),
                    quantization,
                )
        self._max_num_seqs = max_num_seqs
        sampler = Sampler(config.vocab_size, ops)
        self.full: Lane
        self.splits: Sequence[Split]
        if self._device.type == "cuda":
            from engine.execution.cuda.setup import make_lanes

            if graphs and config.experts is not None:
                log.warning(
                    "models with experts run without CUDA graphs: which experts are used is decided in the step"
                )
            pool = _zeros((self.num_pages + 1, *page_shape), in_pages, self._device)
            self._cuda = make_lanes(
                model,
                ops,
                sampler,
                pool,
                max_model_len=config.max_model_len,
                max_decodes=max_num_seqs if graphs and config.experts is None else 0,
                split=lanes,
                on_progress=progress,
            )
            self.pool = pool[: self.num_pages]  # the last page takes the padding of captured decodes
            self.full, self.splits = self._cuda.full, self._cuda.splits
        else:
            self.pool = _zeros((self.num_pages, *page_shape), in_pages, self._device)
            kv = [self.pool[:, layer] for layer in range(config.num_layers)]
            step, cores = ModelStep(model, kv, sampler, self._device), torch.get_num_threads()
            self.full = CallerLane(step, cores)
            prefill_step = ModelStep(model.with_own_workspaces(), kv, sampler, self._device)
            self.splits = make_splits(step, prefill_step, cores) if lanes else []

    @property
    def vocab_size(self) -> int:
        """See `engine.execution.executor.Executor`."""
        return self.config.vocab_size

    def warm_up(self, max_tokens: int) -> None:
        """Runs the largest possible steps on a GPU, so that it runs out of memory now or never.

        Args:
            max_tokens: Most tokens of one step.
        """
        if self._device.type == "cuda":
            from engine.execution.cuda.warm_up import run_largest

            run_largest(self.full, max_tokens, self._max_num_seqs, self.config.max_model_len, self.num_pages)

    def progress(self) -> int:
        """Returns a number that grows while a step is computed, on a CPU with each layer. Thread-safe."""
        return self._model.progress

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page's keys and values of all layers."""
        if self._device.type == "cuda":
            self._cuda.copies.copy(source, target)
        else:
            self.pool[target].copy_(self.pool[source])

    def settle(self) -> None:
        """See `engine.execution.executor.Executor`."""
        if self._device.type == "cuda":
            self._cuda.copies.settle()

    def host_memory(self, host_bytes: int, *, checksums: bool) -> TorchHostMemory:
        """Allocates host memory for evicted pages. Call it before the pool is used: it times copies.

        Raises:
            ConfigError: Not even one page fits, or the host has too little memory.
        """
        num_slots = count_slots(host_bytes, self.page_bytes)
        check_host_memory(host_bytes)
        shape = (num_slots, *self.pool.shape[1:])
        slots = _zeros(shape, self.pool.dtype, torch.device("cpu"))
        if self._device.type == "cuda":
            from engine.execution.cuda.host_memory import CudaHostMemory, pin

            return CudaHostMemory(self.pool, pin(slots), self._cuda.copies, checksums=checksums)
        return CpuHostMemory(self.pool, slots, checksums=checksums)

    def model_memory(self) -> ModelMemory:
        """Returns what can give the memory of weights and pool away for a while, and get it back.

        Raises:
            ConfigError: The device is a GPU.
        """
        if self._device.type == "cuda":
            raise ConfigError("models can't share a GPU's memory yet; leave --device-memory out")
        return ModelMemory(self._model.weights(), self.pool, self._read_again, str(self._model_dir))

    def _read_again(self) -> Generator[tuple[torch.Tensor, torch.Tensor], None, None]:
        with open_checkpoint(self._model_dir, self.config) as checkpoint:
            checkpoint.check(self._tensors)
            yield from self._model.read_again(checkpoint)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates zeros. On a CPU they are resident: no step waits for a page fault."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(own(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape).zero_()
