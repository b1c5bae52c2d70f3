"""How calls to workers are made and taken: administration and health checks, over gRPC."""

from worker.channels import MAX_MESSAGE_BYTES

# A host that is gone, or a process that is stopped, is noticed after at most the sum of both. The keepalive timeout
# alone sees only what TCP sees, and a stopped process's kernel still acknowledges: its missing answers count from the
# ping timeout.
KEEPALIVE_MS = 3_000
KEEPALIVE_TIMEOUT_MS = 5_000

CLIENT_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # that of the environment is for the outside world
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVER_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)
