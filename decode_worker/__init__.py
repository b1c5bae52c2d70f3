"""Prompts or pages in, tokens out: the combined node."""
