"""Workloads: the prompts of a run."""
