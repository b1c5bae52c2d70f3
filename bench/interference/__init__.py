"""The interference study: what prompts that come in a burst do to the streams that are being decoded."""
