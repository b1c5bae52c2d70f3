"""Decides which sequences run, and which of their tokens the next step computes."""
