"""Certificates in files."""

from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


def certificate_files(directory: Path) -> tuple[Path, Path]:
    """Writes a certificate for localhost and 127.0.0.1, signed by itself, and its key; returns both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # a name for each: OpenSSL looks for authorities by name
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"localhost {serial}"[:64])])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), serial)
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    names = [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    cert_file, key_file = directory / "cert.pem", directory / "key.pem"
    cert_file.write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return cert_file, key_file
