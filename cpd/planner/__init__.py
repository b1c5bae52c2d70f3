"""Decides how many workers there are of each role."""
