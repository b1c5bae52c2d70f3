"""Runs batches on a device."""
