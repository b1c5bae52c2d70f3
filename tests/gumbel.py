"""The sampler's noise, as an oracle: a sampled token is the argmax of logits / temperature + noise."""

import numpy as np
import torch
from torch import Tensor

from engine.batch import SampleRow
from engine.execution.sampling.sampler import _row_keys
from engine.ops.draw import minus_exponential, token_keys
from engine.types import SamplingParams


def gumbel_noise(seed: int, choice: int, position: int, vocab_size: int) -> Tensor:
    """Returns the noise of the token at `position`. [vocab_size] float32"""
    row = SampleRow(0, SamplingParams(seed=seed), choice, position, np.zeros(0, np.int32), 0)
    keys = token_keys(vocab_size, torch.device("cpu")), torch.from_numpy(_row_keys([row]))
    return minus_exponential(*keys)[0].neg_().log_().neg_()
