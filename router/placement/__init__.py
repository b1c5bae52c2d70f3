"""Which workers a request goes to, and why."""
