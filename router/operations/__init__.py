"""What operators ask of routers."""
