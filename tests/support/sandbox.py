"""A sandbox for generated code, or the reason why there is none."""

from __future__ import annotations

import os

import pytest

from depthroute.evaluation.sandbox import check_sandbox


@pytest.fixture(scope="session")
def sandbox():
    """Skips where there is no sandbox, with the reason; fails where DEPTHROUTE_REQUIRE_SANDBOX asks for one."""
    try:
        check_sandbox()
    except RuntimeError as error:
        if os.environ.get("DEPTHROUTE_REQUIRE_SANDBOX"):
            raise
        pytest.skip(str(error))
