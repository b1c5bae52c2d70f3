"""What prefill and decode workers share: gRPC server, sessions, lease, engine thread, landings."""
