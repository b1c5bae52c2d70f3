"""Grammars that outputs must follow: what clients ask for, checks and compilation, and the masks for sampling."""
