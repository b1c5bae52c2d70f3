import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cpd.common.errors import ConfigError, CPDError
from deploy.endpoint import has_workers, pick_port, read_cluster, url_of


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        here = {"r": {"state": "ready"}, "s": {"state": "ready"}}
        half = {"r": {"state": "ready"}, "s": {"state": "syncing"}}
        workers = [("a", 1, here), ("b", 2, half)]
        body = json.dumps(
            {"workers": [{"id": name, "pid": pid, "routers": seen} for name, pid, seen in workers]}
        ).encode()
        wrong = self.path == "/cluster" and self.headers["authorization"] != "Bearer key"
        self.send_response(401 if wrong else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_free_port_is_picked_for_zero() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", pick_port("127.0.0.1", 0)))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use; choose another with --port"):
            pick_port("127.0.0.1", port)


@pytest.mark.parametrize(("host", "message"), [("no.such.host.invalid", "not a known"), ("192.0.2.77", "cannot")])
def test_an_address_of_another_machine_is_refused(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pick_port(host, 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("10.1.2.3", "http://10.1.2.3:1"), ("::1", "http://[::1]:1")],
)
def test_the_url_is_reachable_from_this_machine(host: str, url: str) -> None:
    assert url_of(host, 1) == url


def test_the_cluster_is_read_with_the_key(url: str) -> None:
    assert [worker["id"] for worker in read_cluster(url, "key")["workers"]] == ["a", "b"]
    with pytest.raises(CPDError, match="401"):
        read_cluster(url, "")


def test_proxy_variables_are_ignored(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert read_cluster(url, "key")["workers"]


def test_a_cluster_is_ready_when_all_routers_can_use_all_workers(url: str) -> None:
    assert has_workers(url, "key", {"a": 1}, ["r", "s"])
    assert has_workers(url, "key", {"a": 1, "b": 2}, ["r"])
    assert not has_workers(url, "key", {"a": 1, "b": 2}, ["r", "s"])
    assert not has_workers(url, "key", {"a": 1}, ["r", "s", "t"])
    assert not has_workers(url, "key", {"a": 2}, ["r"])
    assert not has_workers(url, "key", {"a": 1, "c": 3}, ["r"])
    assert not has_workers(url, "wrong", {"a": 1}, ["r"])


def test_an_endpoint_that_does_not_answer_is_an_error() -> None:
    url = url_of("127.0.0.1", pick_port("127.0.0.1", 0))
    assert not has_workers(url, "", {}, [])
    with pytest.raises(CPDError, match=f"{url} does not answer: .*refused"):
        read_cluster(url, "")
