"""Puts the drop-in's folder on the path of these tests, and on nobody else's: child processes of
other tests import the real TransferQueue where it is installed."""

from __future__ import annotations

import sys

from dataplane import compat

if compat.folder() not in sys.path:
    sys.path.insert(0, compat.folder())
