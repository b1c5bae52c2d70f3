"""Lanes on a CPU."""
