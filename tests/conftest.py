"""Settings of the whole suite. Fixtures that start planes stand beside the tests that use them."""

from __future__ import annotations

import os

from hypothesis import settings

# Read when Ray is imported: no usage report, and none of its start-up notices.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# A shared 2-core machine stalls now and then: an example's own time proves nothing.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")

# Measurements are run by `make bench`.
collect_ignore = ["bench"]
