"""Splits a model's output into content, reasoning and tool calls.

A parser is fed with text as it arrives and returns events; how the text is cut into pieces does not change their joined
result. Text that is no call is content, exactly as written.
"""
