"""Where randomness comes from: numbered generators, so that everything is a function of a seed and a number."""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What a generator is for."""

    SESSION = 0  # one for each session
    GROUP = 1  # one for each group of prompts that begin alike
    BLOCK = 2  # one for each block of a trace's prompts
    SALT = 3  # one for a run
    PAUSE = 4  # one for the pause before each session of a user


def generator(seed: int, stream: Stream, index: int = 0) -> np.random.Generator:
    """The generator with this number; those of different arguments have nothing in common."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, stream, index))))
