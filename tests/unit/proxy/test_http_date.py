"""Dates as RFC 9110 section 5.6.7 wants them, whatever the locale."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.replier import http_date


def test_the_example_of_the_rfc():
    assert http_date(784111777) == b"Sun, 06 Nov 1994 08:49:37 GMT"


@pytest.mark.parametrize(
    ("wall_s", "text"),
    [
        (0, b"Thu, 01 Jan 1970 00:00:00 GMT"),
        (951782400, b"Tue, 29 Feb 2000 00:00:00 GMT"),
        (1767225599.999, b"Wed, 31 Dec 2025 23:59:59 GMT"),
        (1767225600, b"Thu, 01 Jan 2026 00:00:00 GMT"),
    ],
)
def test_edges(wall_s, text):
    assert http_date(wall_s) == text


@given(st.integers(min_value=0, max_value=253_402_300_799))
def test_it_agrees_with_the_standard_library(wall_s):
    assert http_date(wall_s).decode() == formatdate(wall_s, usegmt=True)
