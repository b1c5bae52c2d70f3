"""Who sends a request: the API key decides, and keeps the tenants' caches apart."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from router.errors import ApiError


@dataclass(frozen=True, slots=True)
class Tenant:
    """Attributes:
    name: Tells tenants apart without giving their keys away; empty where there are no keys.
    salt: Part of every block hash, so that no tenant can find out what another one's prompts were.
    """

    name: str = ""
    salt: bytes = b""


class Keys:
    """The API keys that clients may send; none means that everyone is welcome."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._tenants = [(_digest(key), _tenant(key)) for key in keys]

    def tenant(self, authorization: bytes) -> Tenant:
        """Whose request it is that came with this `Authorization` header.

        Raises:
            ApiError: The key is missing or wrong (401).
        """
        if not self._tenants:
            return Tenant()
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise _unauthorized("No API key was sent. Send it in the header 'Authorization: Bearer <key>'.")
        sent = blake2b(key.strip()).digest()
        # every key is compared, each in constant time: the time tells nothing about them
        matches = [tenant for digest, tenant in self._tenants if hmac.compare_digest(digest, sent)]
        if not matches:
            raise _unauthorized("The API key is wrong.")
        return matches[0]


def _digest(key: str) -> bytes:
    return blake2b(key.encode()).digest()


def _tenant(key: str) -> Tenant:
    return Tenant(
        name=blake2b(key.encode(), digest_size=8, person=b"cpd-tenant").hexdigest(),
        salt=blake2b(key.encode(), digest_size=16, person=b"cpd-salt").digest(),
    )


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        kind="invalid_request_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
