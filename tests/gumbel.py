"""The sampler's noise, as an oracle: a sampled token is the argmax of logits / temperature + noise."""

from torch import Tensor

from engine.execution.sampling.sampler import _minus_exponential, _row_keys, _token_keys


def gumbel_noise(seed: int, choice: int, position: int, vocab_size: int) -> Tensor:
    """Returns the noise of the token at `position`. [vocab_size] float32"""
    keys = _row_keys([seed], [choice], [position])
    return _minus_exponential(_token_keys(vocab_size), keys)[0].neg_().log_().neg_()
