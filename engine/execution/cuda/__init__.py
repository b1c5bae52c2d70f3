"""The engine on NVIDIA GPUs: parts of the device, buffers, graphs and lanes."""
