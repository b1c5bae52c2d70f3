"""Decides which models are awake on a device whose memory they share."""
