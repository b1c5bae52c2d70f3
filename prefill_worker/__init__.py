"""The prefill worker: computes prompts for combined workers, samples first tokens and sends the KV pages."""
