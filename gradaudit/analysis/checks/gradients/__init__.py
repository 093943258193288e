"""Gradient zones."""
