"""Paths, ids, limits, errors and the life of a request."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.core import errors, ids
from server.core.errors import BadInput, ServiceError
from server.core.ids import RunId, SamplingSessionId, SessionId, TenantId
from server.core.limits import MAX_TTL_S, MIN_TTL_S, check_ttl, text_metadata
from server.core.paths import (
    MAX_NAME_LENGTH,
    CheckpointKind,
    CheckpointPath,
    check_name,
    parse_kind,
    parse_path,
)
from server.core.recent import Recent
from server.core.requests import NEXT, PASS_KINDS, REPLAYED_KINDS, Kind, State

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, ServiceError)
]
RETRIED_BY_THE_SDK = {408, 409, 429} | set(range(500, 600))


def accepted(name: str) -> bool:
    try:
        check_name(name)
    except BadInput:
        return False
    return True


names = st.one_of(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._\-+=@ ]{0,30}", fullmatch=True), st.text(max_size=40)
).filter(accepted)
runs = st.from_regex(r"session-[0-9a-f]{16}:train:[0-9]{1,3}", fullmatch=True)


@given(runs, st.sampled_from(CheckpointKind), names)
def test_a_path_is_what_its_text_says(run: str, kind: CheckpointKind, name: str):
    path = CheckpointPath(RunId(run), kind, name)
    assert parse_path(str(path)) == path


@given(names)
def test_no_accepted_name_escapes_a_folder_or_breaks_a_url(name: str):
    assert PurePosixPath("/data/weights", name).parent == PurePosixPath("/data/weights")
    assert ".." not in name
    url = urlsplit(f"http://host/api/v1/checkpoints/{name}/publish?x=1#y")
    assert unquote(url.path) == f"/api/v1/checkpoints/{name}/publish"
    assert unquote(quote(name)) == name
    assert name.isascii()
    assert name.isprintable()
    assert name == name.strip()


HARMFUL = ["", ".", "..", "a/b", "a\\b", "../a", "a..b", ".hidden", "-flag", " a", "a ", "a\n"]
HARMFUL += ["a\0b", "ünder", "a%2fb", "a?b", "a#b", "a:b", "~a", "x" * (MAX_NAME_LENGTH + 1)]


@pytest.mark.parametrize("name", HARMFUL)
def test_a_name_that_could_do_harm_is_refused_with_the_rule(name: str):
    with pytest.raises(BadInput, match="checkpoint name"):
        check_name(name)


@given(st.text(max_size=60))
def test_any_text_is_a_path_or_is_refused_in_one_printable_sentence(text: str):
    for candidate in (text, f"tinker://{text}", f"tinker://run/weights/{text}"):
        try:
            path = parse_path(candidate)
        except BadInput as error:
            refusal = str(error)
        else:
            refusal, candidate_again = "", str(path)
            assert candidate_again == candidate
        assert refusal.isprintable()
        assert len(refusal) < 400


@pytest.mark.parametrize("path", ["tinker://run/weights", "http://run/weights/a", "run/weights/a"])
def test_a_path_has_exactly_three_segments(path: str):
    with pytest.raises(BadInput, match="is not of the form"):
        parse_path(path)


def test_an_unknown_kind_is_told_the_known_ones():
    with pytest.raises(BadInput, match="weights, sampler_weights, external_weights"):
        parse_kind("gradients")


def test_ids_derived_from_what_the_client_sent_are_the_same_every_time():
    session = SessionId("session-1")
    assert ids.run_id(session, 3) == "session-1:train:3"
    assert ids.sampling_session_id(session, 0) == "session-1:sample:0"
    assert ids.request_id(RunId("r"), 7) == "r:7"
    assert ids.sequence_ids(ids.request_id(SamplingSessionId("s"), 1), 2) == ["s:1:0", "s:1:1"]


def test_random_ids_differ():
    assert ids.new_session_id() != ids.new_session_id()
    assert ids.new_folder_name() != ids.new_folder_name()


def test_two_tenants_that_use_one_key_copy_to_two_places():
    holders = {ids.holder_id(TenantId(tenant), "key") for tenant in ("a", "b")}
    assert len(holders) == 2
    assert ids.holder_id(TenantId("a"), "key") in holders


@pytest.mark.parametrize("seconds", [None, MIN_TTL_S, MAX_TTL_S])
def test_a_lifetime_within_the_limits_is_taken(seconds: int | None):
    assert check_ttl(seconds) == seconds


@pytest.mark.parametrize("seconds", [0, -1, MIN_TTL_S - 1, MAX_TTL_S + 1, 10**400])
def test_a_lifetime_beyond_them_is_refused_with_both(seconds: int):
    with pytest.raises(BadInput, match=f"{MIN_TTL_S}.*{MAX_TTL_S}"):
        check_ttl(seconds)


def test_metadata_is_text_when_it_is_read_back():
    assert text_metadata({"a": "b", "n": 1, "none": None}) == {"a": "b", "n": "1", "none": "None"}
    assert text_metadata(None) == {}


@pytest.mark.parametrize("error", CLASSES)
def test_what_the_sdk_would_retry_by_itself_is_only_what_may_be_retried(error: type[ServiceError]):
    if error.retry:
        assert error.status in RETRIED_BY_THE_SDK
    elif error is not ServiceError:
        assert error.status not in RETRIED_BY_THE_SDK


@pytest.mark.parametrize("error", CLASSES)
def test_a_mistake_of_the_caller_is_a_4xx(error: type[ServiceError]):
    assert (400 <= error.status < 500) == (error.category == "user")


def test_a_request_ends_once():
    assert set(NEXT) == set(State)
    for state, following in NEXT.items():
        assert state not in following
        for one in following:
            assert not NEXT[one], f"{one} is reached from {state} and must be the end"
    assert NEXT[State.WAITING] == {State.DONE, State.FAILED}


def test_only_what_is_computed_is_replayed_or_packed():
    assert {Kind.FORWARD_BACKWARD} == PASS_KINDS & REPLAYED_KINDS
    assert {Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP} == REPLAYED_KINDS


def test_recent_keeps_what_was_used_last():
    recent: Recent[str, int] = Recent(most=2)
    recent.put("a", 1)
    recent.put("b", 2)
    recent.get("a")
    recent.put("c", 3)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (1, None, 3)
    recent.drop("a")
    recent.drop("never there")
    assert recent.get("a") is None
    assert len(recent) == 1
