"""A mock server with known timing and faults, to test the load generator.

`requests` reads a request, `answer` decides what to send when, `clock` knows when the server is frozen, `server` sends,
and `process` runs the server as a child process.
"""
