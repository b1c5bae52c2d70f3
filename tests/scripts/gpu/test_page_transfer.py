import multiprocessing.connection
import os
import time

import pytest
import torch

from scripts.gpu import page_transfer
from scripts.gpu.common import MissingError
from scripts.gpu.page_transfer import PeerError, transfer_seconds
from scripts.gpu.results import Report
from scripts.gpu.transfer_peers import arrived, contents, targets
from tests.scripts.gpu.test_results import CEILINGS, ENVIRONMENT


def test_the_receiver_sees_pages_in_the_wrong_place_and_bytes_that_are_missing() -> None:
    count, page_bytes = 8, 64
    right = torch.empty(count, page_bytes, dtype=torch.uint8)
    right[targets(count)] = contents(torch.arange(count), page_bytes)
    assert arrived(right.flatten(), page_bytes)
    assert not arrived(right.roll(1, 0).flatten(), page_bytes)
    right[3, 5] += 1
    assert not arrived(right.flatten(), page_bytes)


def _dies(pipe: multiprocessing.connection.Connection, device: str, size: int) -> None:
    os._exit(1)


def _is_silent(pipe: multiprocessing.connection.Connection, device: str, size: int) -> None:
    time.sleep(100)


def test_a_peer_that_is_silent_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfer, "PATIENCE_S", 0.1)
    with pytest.raises(PeerError, match="no answer"):
        list(transfer_seconds(_is_silent, _is_silent, "cpu", 1 << 20, [1 << 20]))


def test_a_transport_whose_peers_die_leaves_the_other_which_moves_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("page_transfer", "?", ENVIRONMENT, CEILINGS)
    ucxx = page_transfer.TRANSPORTS["ucxx"]
    monkeypatch.setattr(page_transfer, "TRANSPORTS", {"broken": ("torch", _dies, _dies), "ucxx": ucxx})
    page_transfer.measure(report, "cpu", 2 << 20, [256 << 10, 1 << 20])
    assert [(figure.name, figure.value is None) for figure in report.figures] == [
        ("broken: failed", True),
        ("ucxx: pages of 0.25 MiB", False),
        ("ucxx: pages of 1 MiB", False),
    ]
    assert "died" in report.figures[0].note


@pytest.mark.nixl
def test_the_transport_of_workers_is_measured_beside_them() -> None:
    report = Report("page_transfer", "?", ENVIRONMENT, CEILINGS)
    page_transfer.own_transport(report, "CPD over NIXL", "cpu", 2 << 20, [256 << 10, 1 << 20], {})
    assert [(figure.name, figure.value is None) for figure in report.figures] == [
        (f"CPD over NIXL: {pages} pages of {size} MiB", False) for size in ("0.25", "1") for pages in (1, 2)
    ]


def test_without_any_transport_the_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_transfer, "find_spec", lambda _: None)
    with pytest.raises(MissingError, match="NIXL"):
        page_transfer.measure(Report("page_transfer", "?", ENVIRONMENT, CEILINGS))


@pytest.mark.parametrize("page_bytes", page_transfer.PAGE_BYTES)
def test_the_pool_is_a_whole_number_of_pages(page_bytes: int) -> None:
    assert page_transfer.POOL_BYTES % page_bytes == 0
