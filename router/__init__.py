"""The router: validates and tokenises requests, places them on workers, and streams their text."""
