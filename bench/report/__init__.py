"""What a person sees of a result: progress, tables, one HTML file."""
