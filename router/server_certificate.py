"""The certificate of the HTTP endpoint, which can be replaced while the router serves."""

import ssl
from pathlib import Path

from cpd.common.errors import ConfigError


class ServerCertificate:
    """Serves TLS with the certificate that was used last. Connections keep the one with which they began.

    Attributes:
        context: For the server.
    """

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.sni_callback = self._choose  # called in every handshake, also without a name
        self._current = self.context

    def use(self, context: ssl.SSLContext) -> None:
        """Takes the certificate of this context for new connections."""
        self._current = context

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current


def certificate_files(cert: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """Returns the files of `--tls-cert` and `--tls-key`; None without TLS.

    Raises:
        ConfigError: One is missing.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key belong together: give both or none")
    return cert, key


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Returns the context that serves with a certificate.

    Raises:
        ConfigError: The files can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # else OpenSSL would ask on the terminal
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} can't be used: {error.reason or 'no PEM files without password'}"
        ) from None
    except OSError as error:
        raise ConfigError(f"--tls-cert {cert} and --tls-key {key} can't be read: {error.strerror}") from None
    return context
