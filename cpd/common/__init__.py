"""What every process uses: settings, errors, block hashes, leases, streams of messages."""
