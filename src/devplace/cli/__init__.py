"""Command line: `devplace`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import os
import sys

_OFF = ("", "0", "false", "off", "no")


def main() -> None:
    """Run the command line; every error is one line on stderr and an exit code."""
    from devplace.cli.commands import devplace
    from devplace.errors import DevplaceError

    try:
        devplace(standalone_mode=True)
    except DevplaceError as error:
        print(f"devplace: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"devplace: cannot write the output: {error.strerror}.", file=sys.stderr)
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
