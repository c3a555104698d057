"""Optional libraries, imported by the placer that needs them when it runs."""

from __future__ import annotations

from importlib.util import find_spec


def missing(module: str, package: str, extra: str) -> str:
    """Empty if `module` can be imported, else what to install.

    Args:
        module: Name it is imported by.
        package: Name it is installed by.
        extra: Extra of devplace that has it.
    """
    if find_spec(module) is not None:
        return ""
    return f"needs {package}: pip install 'devplace[{extra}]'"
