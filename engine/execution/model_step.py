"""A step through the model and the sampler, on the device's current stream."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Batch, IntArray, Sampled
from engine.execution.sampling.sampler import Chosen, Sampler
from engine.model.decoder import Decoder
from engine.ops.base import DeviceBatch
from engine.ops.buffers import pack


class Steps:
    """Computes steps, one at a time. What several of these share, no step changes, but for pages that differ.

    Args:
        kv: For each layer [num_pages, 2, Hkv, BS, D].
    """

    def __init__(self, model: Decoder, kv: Sequence[torch.Tensor], sampler: Sampler, device: torch.device) -> None:
        self.model = model
        self.kv = kv
        self.device = device
        self.sampler = sampler

    def __call__(self, batch: Batch) -> list[Sampled]:
        """The tokens of a step, one a sample row."""
        chosen = self.start(batch)
        return chosen.read() if chosen else []

    @torch.inference_mode()
    def start(self, batch: Batch, before: torch.Tensor | None = None) -> Chosen | None:
        """Has a step computed. None: it samples nothing.

        Args:
            before: What the step before chose, if the batch has `token_sources`: int64, one a sample, on the device.
        """
        rows = np.fromiter((sample.row for sample in batch.samples), np.int32, len(batch.samples))
        unique, choice_rows = np.unique(rows, return_inverse=True)  # several choices may share one prompt's row
        logits = self.logits(batch, unique, before)
        if logits is None:
            return None
        if len(unique) != len(rows) or not np.array_equal(unique, rows):
            logits = self.take(logits, choice_rows.astype(np.int32))
        return self.sampler.choose(logits, batch.samples)

    def logits(self, batch: Batch, rows: IntArray, before: torch.Tensor | None = None) -> torch.Tensor | None:
        """Stores keys and values, and computes the logits of tokens `rows`, ascending: [R, V]; None if R is 0."""
        every = len(rows) == len(batch.token_ids)
        loaded = DeviceBatch.of(batch, self.device)
        self.feed(loaded, before)
        return self.model.forward(
            loaded,
            self.kv,
            None if every else pack([rows], self.device)[0],
            len(rows),
        )

    def feed(self, batch: DeviceBatch, before: torch.Tensor | None) -> None:
        """Puts the token ids in their place that only the device knows. Padding keeps its own."""
        sources = batch.host.token_sources
        if sources is None:
            return
        assert before is not None, "a step takes tokens of a step before, and there is none"
        every = len(sources) == len(before)  # ascending numbers below that: all of them
        batch.token_ids[: len(sources)].copy_(before if every else self.take(before, sources))

    def take(self, logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
        """Those rows."""
        return logits.index_select(0, pack([rows], self.device)[0])
