"""Sends requests to workers, and handles their output, refusals and failures."""
