"""Computes a step with the model and the sampler, on the device's current stream."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Batch, IntArray, Sampled
from engine.execution.sampling.sampler import ChosenTokens, Sampler
from engine.model.decoder import Decoder
from engine.ops.base import DeviceBatch
from engine.ops.buffers import upload_arrays


class ModelStep:
    """Computes steps, one at a time. Several may share pages, model and sampler if they write to different pages.

    Args:
        kv: Each layer's [num_pages, 2, Hkv, BS, D].
    """

    def __init__(self, model: Decoder, kv: Sequence[torch.Tensor], sampler: Sampler, device: torch.device) -> None:
        self.model = model
        self.kv = kv
        self.device = device
        self.sampler = sampler

    def __call__(self, batch: Batch) -> list[Sampled]:
        """Computes a step and waits for its tokens, one per sample row."""
        chosen = self.start(batch)
        return chosen.read() if chosen else []

    @torch.inference_mode()
    def start(self, batch: Batch, previous: torch.Tensor | None = None) -> ChosenTokens | None:
        """Starts a step. Returns None if it samples nothing.

        Args:
            previous: Tokens that the previous step chose, one per sample, int64, on the device. Needed if the batch has
                `token_sources`.
        """
        rows = [sample.row for sample in batch.samples]
        unique = sorted(set(rows))
        logits = self.logits(batch, np.array(unique, np.int32), previous)
        if logits is None:
            return None
        if unique != rows:  # choices of one prompt share its row
            index = {row: i for i, row in enumerate(unique)}
            logits = self.take_rows(logits, np.array([index[row] for row in rows], np.int32))
        return self.sampler.choose(logits, batch.samples)

    def logits(self, batch: Batch, rows: IntArray, previous: torch.Tensor | None = None) -> torch.Tensor | None:
        """Stores keys and values, and computes logits of tokens `rows`, ascending: [R, V]; None if R is 0."""
        every = len(rows) == len(batch.token_ids)
        loaded = DeviceBatch.of(batch, self.device)
        self.fill_token_ids(loaded, previous)
        return self.model.forward(loaded, self.kv, None if every else upload_arrays([rows], self.device)[0])

    def fill_token_ids(self, batch: DeviceBatch, previous: torch.Tensor | None) -> None:
        """Copies token ids that only the device knows from the previous step. Padding keeps its own."""
        sources = batch.host.token_sources
        if sources is None:
            return
        assert previous is not None, "a step takes tokens of a previous step, and there is none"
        every = len(sources) == len(previous)  # sources ascend, so equal lengths mean all of them
        batch.token_ids[: len(sources)].copy_(previous if every else self.take_rows(previous, sources))

    def take_rows(self, tensor: torch.Tensor, rows: IntArray) -> torch.Tensor:
        """Returns these rows of a tensor on the device."""
        return tensor.index_select(0, upload_arrays([rows], self.device)[0])
