"""The loss scale over time."""
