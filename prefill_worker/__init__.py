"""Prompt in, KV pages and a first token out."""
