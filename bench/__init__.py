"""`cpd bench`: a load generator for any server with an OpenAI-compatible HTTP endpoint. It knows only HTTP."""
