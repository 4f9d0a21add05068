"""How numbers are written."""

from __future__ import annotations

import pytest

from depthroute.report import formats


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (formats.loss, 3.28705, "3.2870"),
        (formats.loss, None, "\N{EN DASH}"),
        (formats.signed, -0.04901, "\N{MINUS SIGN}0.0490"),
        (formats.signed, 0.002, "+0.0020"),
        (formats.score, 0.43216, "0.4322"),
        (formats.score, 231.456, "231.46"),
        (formats.score, 52310320.57, "52,310,321"),
        (formats.decimals, -0.0001, "0.000"),
        (formats.p_alone, 0.01321, "0.013"),
        (formats.p_alone, 0.00042, "0.0004"),
        (formats.p_alone, 1e-7, "< 0.0001"),
        (formats.p_alone, None, "\N{EN DASH}"),
        (formats.count, 12288, "12,288"),
        (formats.amount, 3_276_800, "3.28 M"),
        (formats.amount, 131_072_000, "131 M"),
        (formats.amount, 999_999, "1.00 M"),
        (formats.amount, 12, "12"),
        (formats.memory, 4.2e9, "4.20 GB"),
        (formats.memory, 41_500_000_000, "41.5 GB"),
        (formats.p_value, 0.0132, "p = 0.013"),
        (formats.p_value, 1e-7, "p < 0.0001"),
        (formats.unbroken, "3.1 ± 0.2, p = 0.03", "3.1\u00a0±\u00a00.2, p\u00a0=\u00a00.03"),
        (formats.duration, 45, "45 s"),
        (formats.duration, 201, "3 min"),
        (formats.duration, 12_240, "3.4 h"),
    ],
)
def test_numbers_are_written_for_readers(write, value, text):
    assert write(value) == text
