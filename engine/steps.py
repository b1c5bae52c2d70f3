"""A step through the model and the sampler, on the device's current stream."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Batch, IntArray, Sampled
from engine.cuda.buffers import pack
from engine.model import Decoder
from engine.ops.base import DeviceBatch
from engine.sampling import Chosen, Sampler


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
    def start(self, batch: Batch) -> Chosen | None:
        """Has a step computed. None: it samples nothing."""
        rows = np.fromiter((sample.row for sample in batch.samples), np.int32, len(batch.samples))
        unique, choice_rows = np.unique(rows, return_inverse=True)  # several choices may share one prompt's row
        logits = self.logits(batch, unique)
        if logits is None:
            return None
        if len(unique) != len(rows) or not np.array_equal(unique, rows):
            logits = self.take(logits, choice_rows.astype(np.int32))
        return self.sampler.choose(logits, batch.samples)

    def logits(self, batch: Batch, rows: IntArray) -> torch.Tensor | None:
        """Stores keys and values, and computes the logits of tokens `rows`, ascending: [R, V]; None if R is 0."""
        every = len(rows) == len(batch.token_ids)
        return self.model.forward(
            DeviceBatch.of(batch, self.device),
            self.kv,
            None if every else pack([rows], self.device)[0],
            len(rows),
        )

    def take(self, logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
        """Those rows."""
        return logits.index_select(0, pack([rows], self.device)[0])
