"""Sending a workload: arrivals, client processes and their health."""
