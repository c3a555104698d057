"""Settings for all tests."""

import os

from hypothesis import settings

# No test is timed. In CI the same examples are drawn every time, so that a change is judged by what
# it changed; elsewhere new ones are tried at every run.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Sums over several threads round in another order; tests that compare bits run ops themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
