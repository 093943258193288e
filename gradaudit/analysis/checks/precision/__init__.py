"""Precision set-up."""
