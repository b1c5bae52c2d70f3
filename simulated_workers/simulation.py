"""Names by which simulated workers differ from real ones."""

SIMULATED = "simulated"
"""The workers' dtype and transport, as routers and `/cluster` show them."""

NOTICE = "The workers are simulated: what they write means nothing, and no device is measured."

INSTANT = "instant"
"""The profile of a device that takes no time."""
