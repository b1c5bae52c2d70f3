"""`python -m engine.kernels`: compiles the kernels ahead of their first use. Without a compiler it only says so."""

import logging

from cpd.process import setup_logging
from engine.kernels import KernelsUnavailableError
from engine.kernels.build import build

if __name__ == "__main__":
    setup_logging("info", "kernels")
    try:
        build()
    except KernelsUnavailableError as error:
        logging.getLogger("engine.kernels").warning("CPU inference will run on slower kernels: %s", error)
