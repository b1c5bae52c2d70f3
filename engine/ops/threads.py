"""How many threads torch's operations on logits use on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

FEW_LOGITS = 1 << 20
"""On a CPU, operations on fewer logits than this run on one thread."""


@contextmanager
def few_threads(logits: Tensor) -> Iterator[None]:
    """Runs torch's operations on this thread alone, if the logits are few and on a CPU.

    Its threads wait for each other after every operation. If another process has the core of one, they wait for that
    process, too: each of the dozen operations of a step, for milliseconds. The kernels' own threads do not.
    """
    if logits.device.type != "cpu" or logits.numel() >= FEW_LOGITS:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
