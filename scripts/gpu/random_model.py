"""The engine's runner with random weights of any model shape: speed does not depend on the values."""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from unittest.mock import patch

import numpy as np
import torch

from cpd.common.blocks import blocks_for
from engine.batch import Batch
from engine.execution.executor import Lane
from engine.execution.runner import TorchRunner
from engine.model.config import load_config
from engine.model.parameters import expected_tensors
from engine.model.weights import Checkpoint
from scripts.gpu.common import Timing
from scripts.gpu.models import Lens, random_pages, step


class RandomCheckpoint(Checkpoint):
    """Random tensors for the model of a folder's config.json, made on the requested device."""

    def __init__(self, model_dir: Path) -> None:
        self._shapes = expected_tensors(load_config(model_dir))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Nothing can be missing."""

    def unused(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        """None is."""
        return []

    def read(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Norms are near one; other weights keep the scale of activations."""
        shapes = [self._shapes[name] for name in names]
        joined = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=device)
        if joined.dim() == 1:
            return joined.uniform_(0.9, 1.1)
        return joined.normal_(std=joined.shape[-1] ** -0.5)


def random_runner(
    fields: Mapping[str, object], *, tokens: int, graph_decodes: int, lanes: bool = False, device: str = "cuda"
) -> TorchRunner:
    """The engine's runner over a model with random weights.

    Args:
        fields: Fields of its config.json, see `models.MODELS`.
        tokens: Size of the KV pool in tokens.
        graph_decodes: CUDA graphs are captured for up to this many decodes; 0 runs eagerly.
        lanes: Prepare splits, which needs Green Contexts.
        device: Device of the runner.

    Raises:
        RuntimeError: Kernels or lanes don't work on the GPU. A worker would go on without them.
    """
    pages = blocks_for(tokens) + 1
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("engine.execution.runner.open_checkpoint", lambda model_dir, _config: RandomCheckpoint(model_dir)),
        patch("engine.execution.runner.model_fingerprint", return_value=bytes(16)),
        patch("engine.ops._CANNOT_BUILD", ()),  # never fall back to a slower back end
    ):
        Path(folder, "config.json").write_text(json.dumps(fields))
        runner = TorchRunner(
            Path(folder),
            dtype="bfloat16",
            device=device,
            kv_bytes=pages * load_config(Path(folder)).page_bytes("bfloat16"),
            max_model_len=0,
            max_num_seqs=max(1, graph_decodes),
            graphs=graph_decodes > 0,
            lanes=lanes,
        )
    if lanes and runner.pool.is_cuda and not runner.splits:
        raise RuntimeError("the device can't be divided into lanes; the log says why")
    return runner


def random_step(runner: TorchRunner, lens: Lens) -> Batch:
    """A step with random tokens over sequences scattered in the pool. Seeded by the number of sequences."""
    rng = np.random.default_rng(len(lens))
    return step(lens, random_pages(lens, runner.num_pages, rng), runner.config.vocab_size, rng)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step by the host's clock, ms.

    Attributes:
        whole: Time of the whole step.
        launch: Host time to launch it.
    """

    whole: Timing
    launch: Timing

    @property
    def note(self) -> str:
        """Spread and launch time, in words."""
        return f"80 % within {self.whole.low:.4g} to {self.whole.high:.4g}; started in {self.launch.median:.3g}"


def step_ms(lane: Lane, batch: Batch, *, warmup: int = 3, repeats: int = 20) -> StepTime:
    """Times a step on an idle device, from `launch` until the tokens are there."""
    whole, launch = [], []
    for _ in range(warmup + repeats):
        started = time.perf_counter()
        lane.launch(batch)
        launched = time.perf_counter()
        lane.collect()
        whole.append((time.perf_counter() - started) * 1e3)
        launch.append((launched - started) * 1e3)
    return StepTime(Timing.of(whole[warmup:]), Timing.of(launch[warmup:]))


def ahead_ms(lane: Lane, batch: Batch, *, warmup: int = 3, repeats: int = 40) -> StepTime:
    """Times a step of decodes with overlap: each is launched before the tokens of the one before are read.

    Args:
        lane: A lane that overlaps.
        batch: A batch that samples from every token.
    """
    lane.launch(batch)
    overlapped = replace(batch, token_sources=np.arange(len(batch.token_ids), dtype=np.int32))
    times = step_ms(lane, overlapped, warmup=warmup, repeats=repeats)  # collects the step before
    lane.collect()
    return times
