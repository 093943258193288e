"""Judges a recorded run: zones, noise, windows, replay, checks. Pure: no torch, clock, random number or screen."""
