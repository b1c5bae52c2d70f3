"""What every CPD process shares: settings, errors, block hashes, membership and the wire stubs."""
