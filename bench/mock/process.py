"""Runs the mock server as a child process, for tests and the self-test."""

import os
import subprocess
import sys
from types import TracebackType
from typing import Self

from bench.errors import BenchError
from bench.mock.behaviour import Behaviour, MockSettings

END_S = 10.0


class MockServer:
    """A mock server on a free port of 127.0.0.1, while the context is open. It ends if this process dies.

    Attributes:
        url: Base URL, without /v1.

    Raises:
        BenchError: It did not start.
    """

    url: str

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self._flags: list[str] = []
        for name, value in (behaviour or Behaviour()).model_dump(exclude_defaults=True).items():
            flag = "--" + name.replace("_", "-")
            self._flags += [flag] if value is True else [flag, str(value)]

    def __enter__(self) -> Self:
        prefix = MockSettings.model_config["env_prefix"]
        others = {name: value for name, value in os.environ.items() if not name.upper().startswith(prefix)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.mock", *self._flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**others, "CPD_SUPERVISED": "1"},
            start_new_session=True,  # keeps Ctrl-C away from it
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().decode().strip()  # empty if it has ended
        if not self.url:
            self._end()
            raise BenchError(f"the mock server did not start (exit code {self._process.returncode}), see above")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()  # it has nothing to clean up
        self._process.wait(END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
