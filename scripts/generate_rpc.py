"""Generates the Python stubs of proto/cpd.proto into cpd/rpc/ (or into a folder given as argument)."""

import os
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes cpd/rpc/cpd_pb2*.py and their .pyi below `out`."""
    # protoc looks for the mypy plugins on the PATH; they lie beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    options = ["python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out"]
    code = protoc.main(
        [
            "protoc",
            f"-Icpd/rpc={ROOT / 'proto'}",
            *(f"--{option}={out}" for option in options),
            "cpd/rpc/cpd.proto",
        ]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with exit code {code}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
