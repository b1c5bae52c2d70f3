"""Generated from proto/cpd.proto by `make rpc`."""
