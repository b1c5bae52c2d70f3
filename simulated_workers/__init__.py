"""Simulated workers: real ones in all but the device, many of them in one process."""
