"""The performance model: what a step takes on a device, and what follows from that."""
