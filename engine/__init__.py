"""The inference engine: model, paged KV cache, scheduler and step loop. Knows nothing of the network."""
