"""Numbered random generators, so that everything random is a function of a seed and a number."""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """Purposes of generators."""

    SESSION = 0  # one per session
    GROUP = 1  # one per group of prompts with a common prefix
    BLOCK = 2  # one per block of a trace's prompts
    SALT = 3  # one per run
    PAUSE = 4  # one per pause before a user's session


def generator(seed: int, stream: Stream, index: int = 0) -> np.random.Generator:
    """A generator for these arguments; generators of different arguments are independent."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, stream, index))))
