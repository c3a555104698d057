"""A pytest plugin (`-p tests.at_once`): tells every failure when it happens, not at the end.

A GPU test can take its process with it; what failed before it is then known all the same.
"""

from __future__ import annotations

from typing import Any

import pytest


class _AtOnce:
    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the traceback of what failed."""
        if report.failed:
            self._terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")
            self._terminal.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Begin where there is a terminal: not in workers of xdist."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(_AtOnce(terminal), "devplace at once")
