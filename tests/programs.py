"""Programs that some tests need, and that scripts/install_test_tools.sh installs."""

import os
from shutil import which

import pytest


def needs(found: object, name: str) -> pytest.MarkDecorator:
    """Skips tests where a program is not `found`; never with CI=true."""
    skips = not found and os.environ.get("CI") != "true"
    return pytest.mark.skipif(skips, reason=f"needs {name} (scripts/install_test_tools.sh)")


CHROMIUM = which("chromium") or which("google-chrome")

needs_chromium = needs(CHROMIUM, "Chromium")

needs_prometheus = needs(which("prometheus") and which("promtool"), "Prometheus")
