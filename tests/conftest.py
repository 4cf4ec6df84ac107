"""How thorough the tests are: `TERAIO_TESTS=ci` (the default) or `long`. No other file of the tests reads the environment for it."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", max_examples=25, deadline=None)
settings.register_profile("long", max_examples=300, deadline=None)
settings.load_profile(os.environ.get("TERAIO_TESTS", "ci"))
