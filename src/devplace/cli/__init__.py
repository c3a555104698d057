"""Command line: `devplace`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import io
import os
import sys

_OFF = ("", "0", "false", "off", "no")


def main() -> None:
    """Run the command line; every error is one line on stderr and an exit code."""
    from devplace.cli.commands import devplace
    from devplace.errors import DevplaceError

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack letters of the user's names
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        devplace(standalone_mode=True)
    except DevplaceError as error:
        print(f"devplace: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        named = f"read or write {error.filename}" if error.filename else "write the output"
        print(f"devplace: cannot {named}: {error.strerror or error}.", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if os.environ.get("DEVPLACE_DEBUG", "").strip().lower() not in _OFF:
            raise
        text = " ".join(str(error).split())
        print(
            f"devplace: internal error: {type(error).__name__}: {text}. "
            f"Set DEVPLACE_DEBUG=1 to see where, and please report it.",
            file=sys.stderr,
        )
        sys.exit(1)
