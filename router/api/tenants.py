"""Tenants: each API key has its own permissions and its own cached prefixes.

A limit of a tenant is stored here and checked by `completions.py` before a request is dispatched.
Workers limit a tenant's share of their queue (`engine/scheduling/queue_limit.py`).
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError

from cpd.common.errors import ConfigError
from router.api.schemas import MAX_PRIORITY
from router.errors import ApiError


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of an API key. By default everything is allowed.

    Attributes:
        name: A hash of the key, so that it does not reveal the key; empty if there are no keys.
        salt: Part of every block hash, so that no tenant can find out the prompts of another one.
        admin: Whether `/metrics` and `/cluster` are allowed.
        min_priority: The lowest `priority` allowed (lower ones go first).
    """

    name: str = ""
    salt: bytes = b""
    admin: bool = True
    min_priority: int = -MAX_PRIORITY

    def check_admin(self) -> None:
        """Raises ApiError (403) if the tenant may not see the cluster's state."""
        if not self.admin:
            raise _forbidden("This API key may not see the cluster's state.", "admin_only")

    def check_priority(self, priority: int) -> None:
        """Raises ApiError (403) if the tenant's requests may not have this priority."""
        if priority < self.min_priority:
            message = f"'priority' is {priority}, and this API key allows no less than {self.min_priority}."
            raise _forbidden(message, "priority_not_allowed", "priority")


class KeyEntry(BaseModel):
    """An entry of the key file: a key and its permissions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Annotated[SecretStr, Field(min_length=1)]
    admin: bool = False
    min_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0


_ENTRIES = TypeAdapter(list[KeyEntry])


def read_keys(file: Path) -> list[KeyEntry]:
    """Reads a key file.

    Raises:
        ConfigError: The file can't be read, or is not a list of keys.
    """
    try:
        entries = _ENTRIES.validate_python(yaml.safe_load(file.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {file} can't be read: {error}") from None
    except yaml.YAMLError:  # its text quotes the file, with the keys
        raise ConfigError(f"the key file {file} is not valid YAML") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"the key file {file} must be a list of keys: {place}: {first['msg']}") from None
    if len({entry.key for entry in entries}) < len(entries):
        raise ConfigError(f"the key file {file} has a key twice")
    if not entries:
        raise ConfigError(f"the key file {file} has no key: nobody could use the cluster")
    return entries


class Keys:
    """The valid API keys. Without any, everyone may do everything.

    Args:
        keys: Keys without restrictions.
        entries: Entries of the key file.
        cluster_token: The key of the cluster's own processes; empty if there is none.
    """

    def __init__(self, keys: Sequence[str], entries: Sequence[KeyEntry] = (), cluster_token: str = "") -> None:
        self._cluster_token = cluster_token.encode()
        self._tenants = [(_digest(key), _tenant(key)) for key in keys]
        for entry in entries:
            key = entry.key.get_secret_value()
            self._tenants.append((_digest(key), _tenant(key, entry.admin, entry.min_priority)))
        if self._tenants and cluster_token:
            self._tenants.append((_digest(cluster_token), _tenant(cluster_token)))

    def check_operator(self, authorization: bytes) -> None:
        """Raises ApiError unless the caller proves to be an operator: with the cluster token, or an admin's key.

        Without any keys, too: a web page must not be able to call a route that changes something.
        """
        if not hmac.compare_digest(authorization, b"Bearer " + self._cluster_token):
            if not self.any:
                raise _unauthorized("This route needs the cluster token: `authorization: Bearer <cluster token>`.")
            self.tenant(authorization).check_admin()

    @property
    def any(self) -> bool:
        """True if there are keys."""
        return bool(self._tenants)

    def tenant(self, authorization: bytes) -> Tenant:
        """The tenant of an `Authorization` header.

        Raises:
            ApiError: The key is missing or wrong (401).
        """
        if not self._tenants:
            return Tenant()
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise _unauthorized("No API key was sent. Send it in the header 'Authorization: Bearer <key>'.")
        sent = blake2b(key.strip()).digest()
        # all keys are compared in constant time, so that the time reveals nothing about them
        matches = [tenant for digest, tenant in self._tenants if hmac.compare_digest(digest, sent)]
        if not matches:
            raise _unauthorized("The API key is wrong.")
        return matches[0]


def _digest(key: str) -> bytes:
    return blake2b(key.encode()).digest()


def _tenant(key: str, admin: bool = True, min_priority: int = -MAX_PRIORITY) -> Tenant:
    return Tenant(
        name=blake2b(key.encode(), digest_size=8, person=b"cpd-tenant").hexdigest(),
        salt=blake2b(key.encode(), digest_size=16, person=b"cpd-salt").digest(),
        admin=admin,
        min_priority=min_priority,
    )


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        kind="invalid_request_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _forbidden(message: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(403, message, kind="invalid_request_error", code=code, param=param)
