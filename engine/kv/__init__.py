"""The paged KV cache: pages, their blocks, and where evicted blocks go."""
