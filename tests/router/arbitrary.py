"""Messages and profiles with arbitrary values."""

import json
from collections.abc import Callable, Container, Iterator
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cpd.performance.model import Profile

FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-320, 1e9, 1e12, 1e300, 1.7e308, -1e300, float("inf"), float("-inf"), float("nan")]
JSON_VALUES: list[Any] = [*FLOATS, 10**400, -1, 0, 1 << 40, "", "x", None, True, [], {}, [1, 1], [2, 1]]
TEXTS = ["", "x", "x\r\ny: z", "x" * 1_000]


def anything(usual: Message, rng: Random, *, but: Container[str] = ()) -> Any:
    """A message like `usual` with arbitrary values in up to three fields, except those named."""
    message = type(usual)()
    message.CopyFrom(usual)
    fields = [field for field in usual.DESCRIPTOR.fields if field.name not in but]
    fields += [field for field, _ in usual.ListFields() if field.name not in but]
    for field in rng.choices(fields, k=rng.randrange(4)) if fields else ():
        value = _value(field, usual, rng)
        message.ClearField(field.name)
        message.MergeFrom(type(usual)(**{field.name: value}))
    return message


def corrupt(profile: Profile, rng: Random) -> bytes:
    """A profile's JSON with one value replaced."""
    document = profile.model_dump(mode="json", by_alias=True)
    rng.choice(list(_places(document)))(rng.choice(JSON_VALUES))
    return json.dumps(document).encode()


def _places(value: Any) -> Iterator[Callable[[Any], None]]:
    """Setters of all values in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield lambda new, key=key: value.__setitem__(key, new)  # type: ignore[misc]
        yield from _places(inner)


def _value(field: Any, usual: Message, rng: Random) -> Any:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields
        return {_one(key, usual, rng): _one(value, usual, rng) for _ in range(rng.randrange(4))}
    if field.is_repeated:
        return [_one(field, usual, rng) for _ in range(rng.randrange(4))]
    return _one(field, usual, rng)


def _one(field: Any, usual: Message, rng: Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_UINT32:
            return rng.choice([0, 1, 2, rng.getrandbits(32), (1 << 32) - 1])
        case FieldDescriptor.TYPE_UINT64:
            return rng.choice([0, 1, 2, rng.getrandbits(64), (1 << 64) - 1])
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice([-(1 << 31), -1, 0, 1, 2, 3, 9])
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return rng.choice(FLOATS)
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice([0, 1, 8, 16]))
        case FieldDescriptor.TYPE_MESSAGE:
            one = GetMessageClass(field.message_type)() if field.is_repeated else getattr(usual, field.name)
            return anything(one, rng)
    raise AssertionError(field.type)
