"""The socket by which `cpd scale` and `cpd restart` ask the launcher of a running cluster for a change.

The client sends one JSON line: the change's name and its arguments. The launcher answers with JSON lines: `{"say": …}`
for each step, then `{"done": true}` or `{"error": …}`. It makes one change at a time, and finishes it also if the
client goes away. The socket lies in the private runtime directory and ends with the launcher.
"""

import contextlib
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from cpd.common.errors import CPDError
from deploy.cluster import Tell

log = logging.getLogger(__name__)

Change = Callable[[Mapping[str, Any], Tell], None]
"""A change: gets its arguments, and a function that shows the user a sentence. Raises CPDError if it is refused."""


def carry_out(change: Change, arguments: Mapping[str, Any], busy: threading.Lock, say: Tell, show: Tell) -> str:
    """Makes a change, unless the cluster is being changed already.

    Args:
        busy: Held while the cluster changes.
        say: Shows the steps, and an error, to the user of the launcher.
        show: Shows the steps to whoever asked for the change.

    Returns:
        Why the change failed; empty if it was made.
    """

    def tell(sentence: str) -> None:
        say(sentence)
        show(sentence)

    if not busy.acquire(blocking=False):
        return "the cluster is being changed already; try again when it has ended"
    try:
        change(arguments, tell)
    except CPDError as error:
        say(f"error: {error}")
        return str(error)
    except Exception as error:
        log.exception("a change failed")
        say(f"error: {error!r}")
        return f"the change failed: {error!r}"
    finally:
        busy.release()
    return ""


@contextlib.contextmanager
def control_socket(path: Path, changes: Mapping[str, Change], busy: threading.Lock, say: Tell) -> Iterator[None]:
    """Carries out changes, on threads of its own, while the context is open.

    Args:
        changes: By name.
        busy: Held while the cluster changes.
        say: Shows the steps to the user of the launcher, too.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                asked = orjson.loads(self.rfile.readline())
                change, arguments = changes[asked["change"]], asked["arguments"]
            except (ValueError, KeyError, TypeError):
                self._send({"error": "the running `cpd up` is of another version and does not know this change"})
                return
            error = carry_out(change, arguments, busy, say, lambda sentence: self._send({"say": sentence}))
            self._send({"error": error} if error else {"done": True})

        def _send(self, message: Mapping[str, Any]) -> None:
            with contextlib.suppress(OSError):  # the client has gone; the change goes on
                self.wfile.write(orjson.dumps(message) + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        block_on_close = False

    with Server(str(path), Handler) as server:
        os.chmod(path, 0o600)
        threading.Thread(target=server.serve_forever, name="control", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def ask(path: Path, change: str, arguments: Mapping[str, Any], show: Tell) -> None:
    """Asks the launcher for a change and waits until it is made.

    Raises:
        CPDError: The launcher refuses, is still starting the cluster, or has ended.
    """
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
            client.sendall(orjson.dumps({"change": change, "arguments": dict(arguments)}) + b"\n")
            with client.makefile("rb") as answers:
                for line in answers:
                    answer = orjson.loads(line)
                    if "say" in answer:
                        show(answer["say"])
                    elif "error" in answer:
                        raise CPDError(answer["error"])
                    else:
                        return
        except FileNotFoundError:
            raise CPDError("the cluster is still starting; try again when it is ready") from None
        except OSError as error:
            raise CPDError(f"`cpd up` does not answer: {error}") from None
    raise CPDError("`cpd up` ended before the change was made")
