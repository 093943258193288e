"""A forward operation by operation, and when it is worth its cost."""
