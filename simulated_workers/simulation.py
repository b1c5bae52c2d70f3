"""What `--simulate` names (the file of a profile, or `instant`), and how simulated workers are told from real ones."""

from pathlib import Path

from cpd.common.errors import ConfigError
from cpd.performance.model import Profile

SIMULATED = "simulated"
"""Their dtype and their transport, as routers and `/cluster` see them."""

NOTICE = "The workers are simulated: what they write means nothing, and no device is measured."

INSTANT = "instant"
"""Devices that take no time."""


def read_profile(simulate: str) -> Profile:
    """The profile of that name.

    Raises:
        ConfigError: The file cannot be read, or is no profile.
    """
    if not simulate:
        raise ConfigError("--simulate is needed: a profile, or `instant`")
    return Profile.instant() if simulate == INSTANT else Profile.load(Path(simulate))


def absolute(simulate: str) -> str:
    """The same name from any directory."""
    return simulate if simulate in ("", INSTANT) else str(Path(simulate).resolve())
