"""The interference study: how bursts of prompts affect running decode streams."""
