"""TLS between processes of a cluster: certificates that are made at start and known by their fingerprints.

A server that other machines reach makes a certificate, and its address names the certificate's SHA-256:

    host:port#<64 hex digits>

Addresses come from signed leases, or over authenticated streams, so a client accepts that certificate and no other.
There is no authority, and nothing expires while a process lives. Clients have no certificate: the handshake of a stream
(`cpd/protocol/handshake.py`) authenticates them, and covers the server's certificate; a gRPC call has the admin key,
and a request to a router's admin port the admin key or an API key.
"""

import os
import socket
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

SERVER_NAME = "cpd"
"""The name in every certificate, for clients that must compare one. It says nothing."""

_MARK = "#"
_LIFE = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's certificate.

    Attributes:
        fingerprint: Its SHA-256.
        context: Serves with it.
        pem: The certificate in PEM.
        key_pem: Its key in PEM.
    """

    fingerprint: bytes
    context: ssl.SSLContext
    pem: bytes
    key_pem: bytes = field(repr=False)

    def named_in(self, address: str) -> str:
        """Returns an address (`host:port`) with the fingerprint."""
        return f"{address}{_MARK}{self.fingerprint.hex()}"


def make_certificate() -> Certificate:
    """Makes a certificate with a new key, which stays in memory."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(key, SHA256())
    )
    pem = made.public_bytes(Encoding.PEM)
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # OpenSSL reads files only; this one is in memory.
    file = os.memfd_create("certificate")
    try:
        os.write(file, key_pem + pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return Certificate(sha256(made.public_bytes(Encoding.DER)).digest(), context, pem, key_pem)


def split_address(address: str) -> tuple[str, int, bytes]:
    """Returns host, port and the certificate's fingerprint, which is empty without TLS.

    Raises:
        OSError: It is not an address.
    """
    place, _, fingerprint = address.partition(_MARK)
    host, _, port = place.rpartition(":")
    try:
        return host.strip("[]"), int(port), bytes.fromhex(fingerprint)
    except ValueError:
        raise OSError(f"{address!r} is not an address") from None


def without_fingerprint(address: str) -> str:
    """Returns the address for people to read."""
    return address.partition(_MARK)[0]


def base_url(address: str) -> tuple[str, ssl.SSLContext | bool]:
    """Returns the URL of the HTTP server at an address, and what a client of httpx must `verify` there.

    Raises:
        OSError: It is not an address.
    """
    *_, fingerprint = split_address(address)
    place = without_fingerprint(address)
    return (f"https://{place}", client_context(fingerprint)) if fingerprint else (f"http://{place}", False)


@lru_cache(maxsize=1024)
def client_context(fingerprint: bytes) -> ssl.SSLContext:
    """Returns the context of clients that accept the certificate with this fingerprint and no other.

    With another one the TLS handshake fails with an `ssl.SSLError`, before the client has sent anything.
    """

    def check(connection: ssl.SSLObject | ssl.SSLSocket) -> None:
        if sha256(connection.getpeercert(binary_form=True) or b"").digest() != fingerprint:
            raise ssl.SSLCertVerificationError("it has another certificate than its lease says")

    class Pinned(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            check(self)

    class PinnedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            check(self)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # OpenSSL verifies chains only
    context.sslobject_class = Pinned
    context.sslsocket_class = PinnedSocket
    return context


def fetch_certificate(host: str, port: int, fingerprint: bytes, timeout_s: float) -> bytes:
    """Returns the certificate with this fingerprint, in PEM, from its server. Blocks.

    Raises:
        OSError: The server can't be reached, or has another certificate.
    """
    with (
        socket.create_connection((host, port), timeout_s) as plain,
        client_context(fingerprint).wrap_socket(plain) as connection,
    ):
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode()
