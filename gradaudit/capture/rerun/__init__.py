"""One batch again: everything it touches is put back."""
