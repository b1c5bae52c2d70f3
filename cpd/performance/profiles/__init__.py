"""The bundled profiles, by name.

`h200-*` are computed from data sheets (`scripts/roofline_profiles.py`); `instant` is a device that takes no time.
"""

from pathlib import Path

from cpd.common.errors import ConfigError

PROFILES = Path(__file__).parent


def bundled_profiles() -> list[str]:
    """Names of the bundled profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def find_profile(profile: str | Path) -> Path:
    """Returns the file of a profile, given its path or the name of a bundled one.

    Raises:
        ConfigError: There is no such profile.
    """
    if str(profile) in bundled_profiles():
        return PROFILES / f"{profile}.json"
    path = Path(profile)
    if path.is_dir() or not path.exists():
        known = ", ".join(bundled_profiles())
        raise ConfigError(
            f"there is no profile {str(profile)!r}: give a file that `cpd profile` wrote, or one of {known}"
        )
    return path


def absolute_profile(profile: str) -> str:
    """Returns a name for the same profile that works in any directory."""
    return profile if profile in ("", *bundled_profiles()) else str(Path(profile).resolve())
