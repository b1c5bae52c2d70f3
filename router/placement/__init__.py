"""Chooses the workers for a request."""
