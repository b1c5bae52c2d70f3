"""What each tenant has used since the router started: for `GET /usage`, and metrics with the label `tenant`.

Tenants are the names in the key file, so there are as many series as there ever were names in it. Without keys there is
one tenant, without a name.
"""

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import TypedDict


class TenantUsage(TypedDict):
    """What a tenant has used. Prompts count from their first token, calls and output tokens at the end of the call."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


_HELP = {
    "requests": "API calls that reached a worker.",
    "prompt_tokens": "Tokens of prompts that got a first token.",
    "cached_tokens": "Tokens of these prompts that were taken from a cache.",
    "completion_tokens": "Output tokens of calls that have ended.",
}


class Usage(Collector):
    """Counts what the tenants use at one router.

    Attributes:
        tenants: Their totals, by name.
    """

    def __init__(self) -> None:
        self.tenants: defaultdict[str, TenantUsage] = defaultdict(unused)

    def prompt(self, tenant: str, tokens: int, cached_tokens: int) -> None:
        """Counts a prompt that has got its first token."""
        total = self.tenants[tenant]
        total["prompt_tokens"] += tokens
        total["cached_tokens"] += cached_tokens

    def call(self, tenant: str, completion_tokens: int) -> None:
        """Counts an API call that has ended, however it did."""
        total = self.tenants[tenant]
        total["requests"] += 1
        total["completion_tokens"] += completion_tokens

    def collect(self) -> Iterable[Metric]:
        """The metrics `cpd_tenant_…_total`. Any thread may call it."""
        tenants = list(self.tenants.items())
        for name, help_text in _HELP.items():
            family = CounterMetricFamily(f"cpd_tenant_{name}", help_text, labels=("tenant",))
            for tenant, total in tenants:
                family.add_metric((tenant,), total[name])  # type: ignore[literal-required]
            yield family


def unused() -> TenantUsage:
    """The usage of a tenant that has not used anything."""
    return {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
