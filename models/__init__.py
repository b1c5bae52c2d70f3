"""Bundled checkpoints."""
