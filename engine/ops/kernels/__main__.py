"""`python -m engine.ops.kernels`: compiles the kernels before their first use. Without a compiler it only warns."""

import logging

from cpd.common.logs import setup_logging
from engine.ops.kernels import KernelsUnavailableError
from engine.ops.kernels.build import build

if __name__ == "__main__":
    setup_logging("info", "text", "kernels")
    try:
        build()
    except KernelsUnavailableError as error:
        logging.getLogger("engine.ops.kernels").warning("CPU inference will use slower kernels: %s", error)
