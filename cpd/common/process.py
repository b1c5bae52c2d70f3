"""What every process of a cluster does at start: logging, and ending with its supervisor."""

import gc
import logging
import os
import signal
import sys
import threading
import time

GRACE_S = 5.0
"""A process whose supervisor is gone has this long to end in order."""

YOUNG_OBJECTS = 50_000
"""A garbage collection looks at what was made since the last one when there is so much of it."""


SWITCH_INTERVAL_S = 1e-4
"""Other threads may hold the interpreter this long while one waits for it."""


def switch_threads_often() -> None:
    """For processes with a thread that is in a hurry, such as an engine's: Python lets it wait 5 ms otherwise."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def collect_garbage_rarely() -> None:
    """For processes that make many objects a request, nearly all of which reference counting frees.

    What was imported by now is never looked at again.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def setup_logging(level: str, name: str) -> None:
    """Logs to stderr, each line with the process's name (such as `combined-0`)."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s %(levelname).1s {name} %(name)s: %(message)s", force=True
    )


def end_with_supervisor() -> None:
    """If a supervisor started this process (CPD_SUPERVISED=1, a pipe as standard input), end when it is gone.

    The pipe's end closes with the supervisor, however it died: then this process gets SIGTERM, and is killed when
    it has not ended GRACE_S later.
    """
    if os.environ.get("CPD_SUPERVISED") != "1":
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
