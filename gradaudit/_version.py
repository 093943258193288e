"""The one place the version is written, beside pyproject.toml; a test holds the two together."""

__version__ = "0.1.0"
