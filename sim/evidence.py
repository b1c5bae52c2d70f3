"""What the figures of a simulation are based on."""

from cpd.performance.model import Profile


def evidence(name: str) -> str:
    """Says what a simulation with a profile (its name or file) proves, without a full stop."""
    profile = Profile.load(name)
    if profile.source == "roofline":
        return f"simulated with a profile computed from data sheets ({profile.device}): no evidence for real hardware"
    return f"simulated with a profile measured on {profile.device}"
