"""What each process of a cluster sets up at start."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time

GRACE_S = 5.0
"""Time that a process has to end in order once its supervisor is gone."""

EXIT_SUPERSEDED = 76
"""Exit code of a process whose id a newer process has taken. Restarting it would end that one in turn."""

EXIT_DRAINED = 77
"""Exit code of a process that was drained with `cpd drain`, and so is not started again."""

AGAIN_S = 0.2
"""Pause before the second SIGTERM: the first one makes a process drain, the second one ends it at once."""

YOUNG_OBJECTS = 50_000
"""Number of new objects that starts a garbage collection of them."""

SWITCH_INTERVAL_S = 1e-4
"""Longest time that a thread holds the interpreter while another one waits for it."""

NICENESS = 5
"""Added to the niceness of threads that give way. What other requests wait for runs before them when cores are few;
much more would leave a thread without a core while it holds the interpreter."""


def switch_threads_often() -> None:
    """Lets an urgent thread, such as an engine's, wait less for the interpreter. Python's default is 5 ms."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def give_way() -> None:
    """Lowers the priority of this thread, and of those that it starts; on Linux a process's threads have their own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it; the thread works all the same
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def collect_garbage_rarely() -> None:
    """Makes garbage collections rare: reference counting frees nearly all objects of a request.

    Objects that exist now, such as modules, are never examined again.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def end_with_supervisor() -> None:
    """Ends this process when its supervisor is gone, if one started it (CPD_SUPERVISED=1, standard input a pipe).

    The pipe closes with the supervisor, however it died. Then this process gets SIGTERM twice, and is killed if it has
    not ended after GRACE_S.
    """
    if os.environ.get("CPD_SUPERVISED") != "1":
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        for pause_s in (AGAIN_S, GRACE_S):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(pause_s)
        os._exit(1)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
