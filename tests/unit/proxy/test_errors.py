"""The table of our own answers."""

from __future__ import annotations

import http
import json
import re
import typing

import pytest

from proxy.audit.record import OUTCOMES
from proxy.errors import (
    ERRORS,
    REASON_PHRASES,
    Code,
    Fault,
    Outcome,
    RequestError,
    error_body,
)

CODES = sorted(ERRORS)


def test_outcomes_are_those_of_the_audit_record():
    assert set(typing.get_args(Outcome)) == OUTCOMES


def test_the_codes_that_may_be_raised_are_those_of_the_table():
    assert set(typing.get_args(Code)) == set(ERRORS)


@pytest.mark.parametrize("code", CODES)
def test_a_code_has_a_row_that_can_be_answered_and_recorded(code):
    kind = ERRORS[code]
    assert kind.code == code
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)
    assert 400 <= kind.status <= 599
    assert REASON_PHRASES[kind.status] == http.HTTPStatus(kind.status).phrase.replace(
        "Request Entity Too Large", "Content Too Large"
    )
    assert kind.outcome in OUTCOMES - {"ok"}
    assert kind.fault in typing.get_args(Fault)
    assert re.fullmatch(r"[a-z_]+_error", kind.type)


@pytest.mark.parametrize("code", CODES)
def test_whose_fault_it_is_shows_in_the_status(code):
    kind = ERRORS[code]
    if kind.fault == "downstream":
        assert kind.status < 500
    elif kind.fault == "upstream":
        assert kind.status >= 502
    else:
        assert kind.status in {429, 500, 503}


def test_the_codes_that_clients_match_on_keep_their_status():
    expected = {
        "invalid_request": 400,
        "envelope_rejected": 400,
        "envelope_stale": 400,
        "unauthorized": 401,
        "method_not_allowed": 405,
        "request_timeout": 408,
        "payload_too_large": 413,
        "rate_limited": 429,
        "headers_too_large": 431,
        "internal_error": 500,
        "upstream_reset": 502,
        "upstream_protocol": 502,
        "upstream_envelope": 502,
        "queue_full": 503,
        "queue_deadline": 503,
        "no_upstream": 503,
        "audit_unavailable": 503,
        "draining": 503,
        "envelope_cache_full": 503,
        "envelope_busy": 503,
        "upstream_timeout": 504,
    }
    assert {code: kind.status for code, kind in ERRORS.items()} == expected


@pytest.mark.parametrize("code", CODES)
def test_the_body_has_openais_form(code):
    problem = RequestError(code, "why", param="model")
    assert json.loads(problem.body()) == {
        "error": {
            "message": "why",
            "type": ERRORS[code].type,
            "param": "model",
            "code": code,
        }
    }


def test_a_body_without_a_field_says_null_and_escapes_what_it_must():
    body = error_body(ERRORS["invalid_request"], 'a "quote"\n\u4e2d')
    assert json.loads(body)["error"]["param"] is None
    assert json.loads(body)["error"]["message"] == 'a "quote"\n\u4e2d'
    assert b"\n" not in body  # it has to fit into one SSE data line


@pytest.mark.parametrize(("asked", "said"), [(-5, 1), (0, 1), (1, 1), (7, 7)])
def test_retry_after_is_at_least_a_second(asked, said):
    assert RequestError("queue_full", "full", retry_after_s=asked).retry_after_s == said


def test_retry_after_is_a_second_unless_said():
    assert RequestError("queue_full", "full").retry_after_s == 1


def test_a_code_that_is_none_cannot_be_raised():
    with pytest.raises(KeyError):
        RequestError("no_such_code", "why")
