"""Makes a worker's part in sharing its machine's device (`residency.py`) from its settings."""

import socket
from collections.abc import Callable

from cpd.common.process_identity import ProcessIdentity
from cpd.common.redis_client import Redis
from cpd.common.settings import Role, WorkerSettings
from cpd.common.trust import ClusterSecret
from cpd.residency.ledger import Ledger
from cpd.residency.predicted import Predicted
from cpd.residency.record import Entry, Owner
from cpd.residency.rule import Rule
from cpd.residency.turn import Own
from worker.context import ExpectedMemory
from worker.residency import Residency

_POLICIES: dict[str, type[Rule] | type[Predicted]] = {"rule": Rule, "predicted": Predicted}

_FIRST_WAKE_S, _DISK_BYTES_S, _STAGED_BYTES_S, _SLEEP_S = 2.0, 0.5e9, 2e9, 0.1
"""Predictions for a model that was never awake."""


def share_device(
    settings: WorkerSettings,
    worker_id: str,
    role: Role,
    expected: ExpectedMemory,
    redis: Redis,
    secret: ClusterSecret,
    *,
    fail: Callable[[str, float], None],
    changed: Callable[[], None],
    on_failure: Callable[[BaseException], None],
) -> Residency:
    """Returns the worker's part; `settings.device_memory` must be set. The last arguments are those of `Residency`."""
    assert settings.device_memory is not None
    fairness, sleep = settings.fairness, settings.sleep
    entry = Entry(
        id=worker_id,
        model=settings.served_model_name,
        role=role,
        owner=Owner.of(ProcessIdentity.own()),
        memory_bytes=expected.size,
        wake_s=_FIRST_WAKE_S + expected.size / _DISK_BYTES_S,
        staged_wake_s=expected.size / _STAGED_BYTES_S,
        sleep_s=_SLEEP_S,
        popular=fairness.popular,
        min_runtime_s=fairness.min_runtime_s,
        max_wait_time_s=fairness.max_wait_time_s,
        idle_timeout_s=sleep.idle_timeout_s,
        drain_timeout_s=sleep.drain_timeout_s,
    )
    return Residency(
        Ledger(redis, settings.cluster, secret, socket.gethostname()),
        _POLICIES[settings.residency](),
        Own(entry, settings.device_memory, fingerprint=expected.fingerprint),
        staging_bytes=settings.staging_memory,
        fail=fail,
        changed=changed,
        on_failure=on_failure,
    )
