"""Errors of the load generator."""

from cpd.common.errors import CPDError


class BenchError(CPDError):
    """A run cannot start or go on; the message tells the user what to do."""
