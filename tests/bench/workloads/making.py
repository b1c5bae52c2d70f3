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
"""Tokens that a chat template like the bundled model's adds: 4 before the text and 5 after it."""


@cache
def exact() -> Texts:
    """Texts whose length is exact."""
    return Texts.with_tokenizer(CHECKPOINT, OVERHEAD)


def workload(seed: int = 0, texts: Texts | None = None, **flags: Any) -> Workload:
    """The workload of these settings."""
    return make_workload(WorkloadSettings.load(flags), texts or exact(), seed)


def prompt_len(text: str) -> int:
    """Number of tokens of a prompt with one message."""
    return tokens(text) + OVERHEAD


def tokens(text: str) -> int:
    """Number of tokens of a text without a template."""
    count = exact().count
    assert count
    return count(text)


def common_tokens(one: str, other: str) -> int:
    """Number of tokens in the common prefix of two texts."""
    tokenizer = exact().tokenizer
    assert tokenizer
    ids, others = (tokenizer.encode(text, add_special_tokens=False).ids for text in (one, other))
    return next((at for at, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), len(ids))


def first_texts(made: Workload, number: int = 20) -> list[str]:
    """The first messages of the first sessions."""
    return [made.session(index).turns[0].text for index in range(number)]


def all_messages(session: Session) -> Sequence[str]:
    """All messages of a session."""
    return [*(message.content for message in session.opening), *(turn.text for turn in session.turns)]
