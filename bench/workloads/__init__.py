"""Workloads: what is asked of the server."""
