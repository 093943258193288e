"""`python -m gradaudit` is the `gradaudit` command."""

from __future__ import annotations

from gradaudit.cli import main

if __name__ == "__main__":
    main(prog_name="gradaudit")
