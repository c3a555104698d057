"""Command line: `devplace`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import io
import os
import sys

_OFF = ("", "0", "false", "off", "no")


def main() -> None:
    """Run the command line; every error is one line on stderr and an exit code."""
    from devplace.cli.terminal import shows_control_characters

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack letters of the user's names
        sys.stdout.reconfigure(errors="backslashreplace")
    with shows_control_characters():
        _run()


def _run() -> None:
    from devplace.cli.commands import devplace
    from devplace.errors import DevplaceError

    try:
        devplace(standalone_mode=True)
    except DevplaceError as error:
        print(f"devplace: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        named = f"read or write {error.filename}" if error.filename else "write the output"
        print(f"devplace: cannot {named}: {error.strerror or error}.", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if os.environ.get("DEVPLACE_DEBUG", "").strip().lower() not in _OFF:
            raise
        text = " ".join(str(error).split())
        print(f"devplace: {_exhausted(error, text) or _internal(error, text)}", file=sys.stderr)
        sys.exit(1)


def _exhausted(error: Exception, text: str) -> str:
    """What the system has no more of; empty if the error is another."""
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return f"not enough memory: {text or 'none is left'}. Plan a smaller model, or free some."
    if isinstance(error, RuntimeError) and ("threads can be" in text or "new thread" in text):
        return f"not enough threads: {text}. Use fewer, or allow more processes (ulimit -u)."
    return ""


def _internal(error: Exception, text: str) -> str:
    return (
        f"internal error: {type(error).__name__}: {text}. "
        f"Set DEVPLACE_DEBUG=1 to see where, and please report it."
    )
