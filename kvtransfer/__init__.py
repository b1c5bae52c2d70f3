"""Moving KV pages between the pools of two processes."""
