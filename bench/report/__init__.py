"""Shows results: progress, tables in a terminal, and HTML pages."""
