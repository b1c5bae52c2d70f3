"""Who is awake: several models share a device's memory."""
