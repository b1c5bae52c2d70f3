"""Secrets of processes, encrypted for their way through Ray to other machines.

Ray keeps the arguments of actors, and its wire is not encrypted. The key is derived from the cluster's secret, which
each machine has in a file, so the processes of the cluster can read what is sealed, and nobody else.
"""

import os
from collections.abc import Mapping

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cpd.common.errors import ConfigError
from cpd.common.trust import ClusterSecret

_NONCE_BYTES = 12


def seal(secret: ClusterSecret, values: Mapping[str, str]) -> bytes:
    """Encrypts texts by name."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + _cipher(secret).encrypt(nonce, orjson.dumps(dict(values)), None)


def unseal(secret: ClusterSecret, sealed: bytes) -> dict[str, str]:
    """Decrypts what `seal` returned.

    Raises:
        ConfigError: It was sealed with another secret.
    """
    try:
        values: dict[str, str] = orjson.loads(
            _cipher(secret).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        )
    except InvalidTag:
        raise ConfigError("--secret-file has another secret on this machine than where `cpd up` runs") from None
    return values


def _cipher(secret: ClusterSecret) -> AESGCM:
    return AESGCM(secret.key("sealed settings"))
