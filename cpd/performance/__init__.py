"""The performance model: how long steps take on a device, and the decisions that follow from it."""
