"""Shared by combined and prefill workers: engine thread, sessions, prefill requests, lease, load reports."""
