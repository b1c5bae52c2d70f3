"""The placement policies by name."""

from collections.abc import Callable
from importlib import import_module

from cpd.common.errors import ConfigError
from cpd.common.policy_settings import PolicySettings
from router.placement.cost_policy import CostPolicy
from router.placement.policy import PlacementPolicy
from router.placement.simple_policies import MostCachedPolicy, RoundRobinPolicy

POLICIES: dict[str, Callable[[PolicySettings], PlacementPolicy]] = {
    "cost": CostPolicy,
    "most-cached": MostCachedPolicy,
    "round-robin": RoundRobinPolicy,
}


def make_policy(settings: PolicySettings) -> PlacementPolicy:
    """Makes the policy that the settings name.

    Raises:
        ConfigError: There is no such policy.
    """
    return _maker(settings.name)(settings)


def _maker(name: str) -> Callable[[PolicySettings], PlacementPolicy]:
    if name in POLICIES:
        return POLICIES[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"policy: there is no {name!r}; use {', '.join(POLICIES)} or module:object")
    try:
        maker = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy: {name} cannot be imported: {error}") from None
    if not callable(maker):
        raise ConfigError(f"policy: {name} is not callable; it must make a policy of the settings")
    found: Callable[[PolicySettings], PlacementPolicy] = maker
    return found
