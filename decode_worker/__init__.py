"""The combined worker: answers requests; prefills short prompts itself and has long ones prefilled."""
