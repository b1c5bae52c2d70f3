"""Whole clusters in virtual time."""
