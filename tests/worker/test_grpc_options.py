"""Channels to workers with TLS."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cpd.common.tls import Certificate, make_certificate
from worker.grpc_options import admin_channel


@pytest.fixture
def certificate() -> Certificate:
    return make_certificate()


@pytest.fixture
def place(certificate: Certificate) -> Iterator[str]:
    """The host and port of a server with the certificate."""
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.pem)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_a_server_with_the_certificate_of_its_address_is_called(certificate: Certificate, place: str) -> None:
    with admin_channel(certificate.named_in(place), 20) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_server_with_another_certificate_is_not_called(place: str) -> None:
    with pytest.raises(OSError, match="it has another certificate than its lease says"):
        admin_channel(make_certificate().named_in(place), 20)


def test_the_key_of_a_certificate_is_not_shown(certificate: Certificate) -> None:
    assert "PRIVATE" not in repr(certificate)
