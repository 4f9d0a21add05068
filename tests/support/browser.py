"""A headless Chromium for tests, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    """A Playwright browser; for one module, since Playwright keeps an event loop running in this thread.

    Without one its tests are skipped with the reason; with DEPTHROUTE_REQUIRE_BROWSER=1 they fail. DEPTHROUTE_CHROMIUM
    names a program that is not on the path.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright is not installed: pip install 'depthroute[browser]'")
    program = os.environ.get("DEPTHROUTE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        missing(f"there is no Chromium (looked for {', '.join(NAMES)}): see `make browser`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


def missing(reason: str) -> None:
    """Skips the test, or fails it where a browser is required."""
    if os.environ.get("DEPTHROUTE_REQUIRE_BROWSER", "0") not in ("", "0"):
        pytest.fail(f"DEPTHROUTE_REQUIRE_BROWSER is set, but {reason}")
    pytest.skip(reason)
