"""Sends a workload: client processes, exact timers and the client's health."""
