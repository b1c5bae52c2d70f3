"""Workloads for tests, with the bundled model's tokenizer as the server's."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from bench.settings import WorkloadSettings
from bench.tokens import Texts
from bench.workloads.base import Session, Workload
from bench.workloads.make import make_workload
from models.tiny import CHECKPOINT

OVERHEAD = 9
"""What a chat template like the bundled model's adds: 4 tokens before the text, 5 behind it."""


@cache
def exact() -> Texts:
    """Texts whose length is exact."""
    return Texts.with_tokenizer(CHECKPOINT, OVERHEAD)


def workload(seed: int = 0, texts: Texts | None = None, **flags: Any) -> Workload:
    """The workload of these settings."""
    return make_workload(WorkloadSettings.load(flags), texts or exact(), seed)


def prompt_len(text: str) -> int:
    """Tokens of a prompt of one message."""
    return tokens(text) + OVERHEAD


def tokens(text: str) -> int:
    """Tokens of a text alone."""
    count = exact().count
    assert count
    return count(text)


def common_tokens(one: str, other: str) -> int:
    """Tokens that two texts have in common at their beginnings."""
    tokenizer = exact().tokenizer
    assert tokenizer
    ids, others = (tokenizer.encode(text, add_special_tokens=False).ids for text in (one, other))
    return next((at for at, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), len(ids))


def first_texts(made: Workload, number: int = 20) -> list[str]:
    """What the first sessions say first."""
    return [made.session(index).turns[0].text for index in range(number)]


def all_messages(session: Session) -> Sequence[str]:
    """Everything that a session says."""
    return [*(message.content for message in session.opening), *(turn.text for turn in session.turns)]
