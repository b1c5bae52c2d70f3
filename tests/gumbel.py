"""The sampler's noise, as an oracle: a sampled token is the argmax of logits / temperature + noise."""

import numpy as np
from torch import Tensor

from engine.batch import SampleRow
from engine.execution.sampling.sampler import _minus_exponential, _row_keys, _token_keys
from engine.types import SamplingParams


def gumbel_noise(seed: int, choice: int, position: int, vocab_size: int) -> Tensor:
    """Returns the noise of the token at `position`. [vocab_size] float32"""
    row = SampleRow(0, SamplingParams(seed=seed), choice, position, np.zeros(0, np.int32), 0)
    return _minus_exponential(_token_keys(vocab_size), _row_keys([row]))[0].neg_().log_().neg_()
