"""Order of calls."""
