"""A mock server whose timing and mistakes are known: what the load generator is tested on.

The way of a request: `server` reads it, `answer` says what is sent when, `clock` knows when the server stands still,
and `process` runs the whole as a child process.
"""
