"""`cpd up --detach`: a launcher that goes on after the command has returned.

The launcher is a fork in a session of its own. Until the cluster is ready it writes to the terminal, and the command
waits for it; then it lets go of the terminal, and the command ends.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


class Detached:
    """The launcher's side, made by `detach`."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def ready(self, text: str) -> None:
        """Lets the command print `text` and end with code 0, and leaves its terminal."""
        sys.stdout.flush()
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (1, 2):
            os.dup2(nowhere, standard)
        os.close(nowhere)
        try:
            with open(self._pipe, "w") as pipe:
                pipe.write(text)
        except BrokenPipeError:  # the command was killed
            pass


def detach() -> Detached:
    """Goes on in a new process. The calling process ends in here, when the cluster is ready or has failed to start."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = os.fork()
    if launcher:
        os.close(write_end)
        _wait_for(launcher, read_end)
    os.close(read_end)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    return Detached(write_end)


def _wait_for(launcher: int, pipe: int) -> NoReturn:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        os.kill(launcher, signal.SIGTERM)

    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(name) != signal.SIG_IGN:
            signal.signal(name, stop)
    with open(pipe) as reader:
        text = reader.read()
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(launcher, 0)
    os._exit(os.waitstatus_to_exitcode(status) or 1)  # 0: ended by a signal before it was ready
