"""Errors of the load generator."""

from cpd.common.errors import CPDError


class BenchError(CPDError):
    """A run cannot start or continue; the message tells the user what to do."""
