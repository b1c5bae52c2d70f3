"""Tenants: each name in the key file has its own permissions and its own cached prefixes.

A name may have several keys, so that a key can be replaced while both work. `tenant_limits.py` counts what tenants use
of their limits. Workers limit a tenant's share of their queue (`engine/scheduling/queue_limit.py`).
"""

import hmac
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError

from cpd.common.errors import ConfigError
from cpd.common.trust import NO_SECRET, ClusterSecret
from router.api.schemas import MAX_PRIORITY
from router.errors import ApiError

CLUSTER_NAME = "_cluster"
"""The tenant of the cluster's own processes. No name in a key file begins with `_`."""

API_KEY_HEADER = b"x-api-key"
"""A key may be sent in this header instead of `Authorization`, as some clients of Anthropic's API do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use at a time; 0 is no limit.

    Attributes:
        requests: Calls in flight.
        tokens_per_minute: Tokens of prompts and outputs.
        body_memory: Bytes of bodies that are being read or processed.
    """

    requests: int = 0
    tokens_per_minute: int = 0
    body_memory: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of API keys. By default everything is allowed.

    Attributes:
        name: The name in the key file, or a hash of the key, which does not reveal it; empty if there are no keys.
        salt: Part of every block hash, so that no tenant can find out the prompts of another one.
        admin: Whether `/metrics`, `/cluster` and `/usage` are allowed.
        min_priority: The lowest `priority` allowed (lower ones go first).
        models: Names or aliases of the models that it may use; None: all.
    """

    name: str = ""
    salt: bytes = b""
    admin: bool = True
    min_priority: int = -MAX_PRIORITY
    limits: Limits = Limits()
    models: frozenset[str] | None = None

    def may_use(self, names: frozenset[str]) -> bool:
        """True if the tenant may use the model with these names."""
        return self.models is None or not self.models.isdisjoint(names)

    def check_admin(self) -> None:
        """Raises ApiError (403) if the tenant may not see the cluster's state."""
        if not self.admin:
            raise _forbidden("This API key may not see the cluster's state.", "admin_only")

    def priority(self, asked: int | None) -> int:
        """Returns the priority of a request; if it asks for none, 0 or the nearest that is allowed.

        Raises:
            ApiError: It asks for one that is not allowed (403).
        """
        priority = max(0, self.min_priority) if asked is None else asked
        if priority < self.min_priority:
            message = f"'priority' is {priority}, and this API key allows no less than {self.min_priority}."
            raise _forbidden(message, "priority_not_allowed", "priority")
        return priority


class KeyEntry(BaseModel):
    """An entry of the key file: a key, whose it is, and its permissions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: Annotated[SecretStr, Field(min_length=1)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    admin: bool = False
    min_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    max_requests: Annotated[int, Field(ge=0)] | None = None
    max_tokens_per_minute: Annotated[int, Field(ge=0)] | None = None
    max_body_memory: ByteSize | None = None
    models: Annotated[list[str], Field(min_length=1)] | None = None

    def limits(self, defaults: Limits) -> Limits:
        """The limits of its owner."""
        own = (self.max_requests, self.max_tokens_per_minute, self.max_body_memory)
        usual = (defaults.requests, defaults.tokens_per_minute, defaults.body_memory)
        return Limits(*(int(other if one is None else one) for one, other in zip(own, usual, strict=True)))


_ENTRIES = TypeAdapter(list[KeyEntry])


def read_keys(file: Path, models: Collection[str] | None = None) -> list[KeyEntry]:
    """Reads a key file.

    Args:
        models: Names and aliases of all models; None: not known.

    Raises:
        ConfigError: The file can't be read, is not a list of keys, or names a model that there is not.
    """
    try:
        entries = _ENTRIES.validate_python(yaml.safe_load(file.read_text()))
        digests = {_digest(entry.key.get_secret_value().encode()) for entry in entries}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {file} can't be read: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"the key file {file} must be a list of keys: {place}: {first['msg']}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # their texts quote the file, with the keys
        raise ConfigError(f"the key file {file} is not valid YAML") from None
    if len(digests) < len(entries):
        raise ConfigError(f"the key file {file} has a key twice")
    if not entries:
        raise ConfigError(f"the key file {file} has no key: nobody could use the cluster")
    if models is not None:
        named = {name for entry in entries for name in entry.models or ()}
        if unknown := sorted(named - set(models)):
            raise ConfigError(
                f"the key file {file} has a key for the model {unknown[0]!r}, and there is none of that name; there"
                f" are: {', '.join(models)}"
            )
    by_name: dict[str, KeyEntry] = {}
    for entry in entries:
        if entry.name is not None:
            other = by_name.setdefault(entry.name, entry)
            if entry.model_copy(update={"key": other.key}) != other:
                raise ConfigError(f"the key file {file} has different rights for the keys of {entry.name}")
    return entries


class Keys:
    """The valid API keys. Without any, everyone may do everything.

    Args:
        keys: Keys without restrictions.
        entries: Entries of the key file.
        secret: The cluster's secret. Its admin key is an operator's key.
        limits: Limits of tenants for which the key file has no others.
    """

    def __init__(
        self,
        keys: Sequence[str],
        entries: Sequence[KeyEntry] = (),
        secret: ClusterSecret = NO_SECRET,
        limits: Limits = Limits(),
    ) -> None:
        self._keys = keys
        self._limits = limits
        self._everyone = Tenant(limits=limits)
        self._secret = secret
        self._tenants: Sequence[tuple[bytes, Tenant]] = ()
        self.replace(entries)

    def replace(self, entries: Sequence[KeyEntry]) -> None:
        """Takes the entries of the key file instead of the earlier ones. Running requests go on."""
        tenants = [(_digest(key.encode()), self._tenant(_hidden(key), limits=self._limits)) for key in self._keys]
        for entry in entries:
            key, limits = entry.key.get_secret_value(), entry.limits(self._limits)
            models = frozenset(entry.models) if entry.models is not None else None
            tenant = self._tenant(entry.name or _hidden(key), entry.admin, entry.min_priority, limits, models)
            tenants.append((_digest(key.encode()), tenant))
        if tenants and self._secret:
            tenants.append((_digest(self._secret.admin_key.encode()), self._tenant(CLUSTER_NAME)))
        self._tenants = tenants

    def check_operator(self, authorization: bytes) -> None:
        """Raises ApiError unless the caller proves to be an operator: with the cluster's admin key, or an admin's key.

        Without any keys, too: a web page must not be able to call a route that changes something.
        """
        scheme, _, key = authorization.partition(b" ")
        own = self._secret.admin_key.encode()
        if not (self._secret and scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), own)):
            if not self.any:
                raise _unauthorized("This route needs the cluster's admin key, which `cpd drain` and others have.")
            self.tenant(authorization).check_admin()

    @property
    def admin_key(self) -> str:
        """The cluster's admin key; empty without a secret."""
        return self._secret.admin_key

    def is_operator(self, tenant: Tenant) -> bool:
        """True if a tenant's key is an operator's. Without any keys nobody's is."""
        return self.any and tenant.admin

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
            return self._everyone
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise _unauthorized(
                "No API key was sent. Send it in the header 'Authorization: Bearer <key>' or 'x-api-key'."
            )
        sent = _digest(key)
        # all keys are compared in constant time, so that the time reveals nothing about them
        matches = [tenant for digest, tenant in self._tenants if hmac.compare_digest(digest, sent)]
        if not matches:
            raise _unauthorized("The API key is wrong.")
        return matches[0]

    def _tenant(
        self,
        name: str,
        admin: bool = True,
        min_priority: int = -MAX_PRIORITY,
        limits: Limits = Limits(),
        models: frozenset[str] | None = None,
    ) -> Tenant:
        # of the name, so that a new key finds what the old one has cached; of the secret, so that nobody can guess it
        salt = self._secret.key(f"salt of tenant {name}")[:16]
        return Tenant(name=name, salt=salt, admin=admin, min_priority=min_priority, limits=limits, models=models)


def credentials(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns a request's `Authorization` header, or what it would be for its `x-api-key`."""
    key = headers.get(API_KEY_HEADER)
    return headers.get(b"authorization", b"" if key is None else b"Bearer " + key)


def _digest(key: bytes) -> bytes:
    """White space around a key, such as a new line in a file, does not count: no client could send it."""
    return blake2b(key.strip()).digest()


def _hidden(key: str) -> str:
    """A name for the owner of a key that has none."""
    return "key-" + blake2b(key.encode(), digest_size=8, person=b"cpd-tenant").hexdigest()


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
