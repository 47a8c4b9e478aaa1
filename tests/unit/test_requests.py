"""Signed requests: who may ask what, and what forgers get."""

from __future__ import annotations

import logging
import string
from pathlib import Path
from typing import Any

import pytest

from holdfast import names
from holdfast.identity.commands import Refusal
from holdfast.identity.credentials import Credentials, new_nkey_seed
from holdfast.identity.requests import (
    GOOD_SECONDS,
    RequestGuard,
    RequestRefused,
    RequestSigner,
)
from holdfast.identity.seed import AccountSeed
from holdfast.identity.users import UserFolder
from holdfast.rates import EVERY_SECONDS, Sparse
from holdfast.testing import FakeClock

SEED = AccountSeed(bytes(range(32)))
NOW = 1_800_000_000.0
DRAIN = names.Names().node("web1", "drain")
RUN = names.Names().dispatch("run")
ANCHORS = {1: SEED.verify_key(1)}


def login(
    role: str,
    *,
    seed: AccountSeed = SEED,
    namespace: str = "hf",
    generations: tuple[int, ...] = (1,),
) -> Credentials:
    plain = Credentials(user=f"{role}-x", role=role, nkey_seed=new_nkey_seed())
    return seed.certify(plain, namespace, generations)


def signed(
    by: Credentials, subject: str = DRAIN, body: bytes = b"", namespace: str = "hf"
) -> dict[str, str]:
    return RequestSigner(by, namespace, lambda: NOW).sign(subject, body)


def guard(**options: Any) -> RequestGuard:
    return RequestGuard("hf", ANCHORS, **options)


def refusal(
    headers: dict[str, str],
    subject: str = DRAIN,
    body: bytes = b"",
    by: RequestGuard | None = None,
    now: float = NOW,
) -> Refusal | None:
    try:
        (by or guard()).check(headers, subject, body, now)
    except RequestRefused as refused:
        return refused.reason
    return None


def test_request_of_an_operator_names_its_sender() -> None:
    """What is signed by a login passes, and says whose it is, whatever the sender declares."""
    found = guard().check(signed(login("operator"), RUN, b"{}"), RUN, b"{}", NOW)
    assert (found.user, found.role) == ("operator-x", "operator")
    assert found.named("dana") == "operator-x: dana"
    assert found.named("") == "operator-x"


def test_request_passes_once() -> None:
    """A replay is refused, for as long as the request is good and afterwards."""
    headers, one = signed(login("operator")), guard()
    assert refusal(headers, by=one) is None
    assert refusal(headers, by=one) is Refusal.REPLAYED
    assert refusal(headers, by=one, now=NOW + GOOD_SECONDS + 1) is Refusal.EXPIRED
    assert refusal(headers, by=guard(), now=NOW + GOOD_SECONDS + 1) is Refusal.EXPIRED


def test_signature_in_another_spelling_passes_once() -> None:
    """The last letter of a signature's text has bits to spare: sixteen texts, one request."""
    headers, one = signed(login("operator")), guard()
    assert refusal(headers, by=one) is None
    text = headers[names.H_SIGNATURE]
    letters = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    for letter in letters:
        forged = headers | {names.H_SIGNATURE: f"{text[:-3]}{letter}=="}
        assert refusal(forged, by=one) in (Refusal.REPLAYED, Refusal.TAMPERED)


def test_flood_of_one_login_shuts_nobody_else_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that cancels without end fills its own memory, not the operator's."""
    monkeypatch.setattr("holdfast.identity.requests.REMEMBERED", 20)
    one, client, operator = guard(), login("client"), login("operator")
    cancel = names.Names().cancel("r1")
    flood = RequestSigner(client, "hf", lambda: NOW + GOOD_SECONDS)
    sent = [flood.sign(cancel, b"") for _ in range(30)]
    assert [refusal(h, cancel, by=one) for h in sent[:20]] == [None] * 20
    for headers in sent[20:]:
        refusal(headers, cancel, by=one)
    assert refusal(signed(client, cancel), cancel, by=one) is Refusal.EXPIRED
    assert refusal(signed(operator), by=one) is None
    assert all(refusal(headers, cancel, by=one) for headers in sent), "nothing passes twice"


@pytest.mark.parametrize("expires", ["²", "٣", "1e9", "-1", "", "9" * 16])
def test_expiry_that_is_no_number_is_refused(expires: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login signs what it likes; digits that are no decimals end nothing."""
    monkeypatch.setattr("holdfast.identity.requests.str", lambda _: expires, raising=False)
    headers = signed(login("operator"))
    assert headers[names.H_EXPIRES] == expires
    monkeypatch.undo()
    assert refusal(headers) is Refusal.TAMPERED


def test_request_signed_before_a_restart_is_refused() -> None:
    """What was obeyed by the process before this one cannot be replayed to it."""
    headers = signed(login("operator"))
    assert refusal(headers, by=guard(), now=NOW + 1) is Refusal.EXPIRED
    moments = iter((0.0, 5.0))
    older = RequestGuard("hf", ANCHORS, monotonic=lambda: next(moments))
    assert refusal(headers, by=older, now=NOW + 1) is None


def test_request_from_the_far_future_is_refused() -> None:
    """A clock that is ahead by hours would make a request that can be kept for later."""
    assert refusal(signed(login("operator")), now=NOW - 3 * GOOD_SECONDS) is Refusal.EXPIRED


@pytest.mark.parametrize("role", ["client", "worker", "scheduler", "coordinator", "nobody"])
def test_role_that_may_not_publish_the_subject_may_not_ask(role: str) -> None:
    """A genuine login of another role is refused: certificates do not widen grants."""
    assert refusal(signed(login(role), RUN), RUN) is Refusal.FORBIDDEN
    assert refusal(signed(login(role), DRAIN), DRAIN) is Refusal.FORBIDDEN


@pytest.mark.parametrize("role", ["client", "worker", "scheduler", "operator", "web"])
def test_roles_that_cancel_runs_may_ask(role: str) -> None:
    """Whoever may publish a cancel may ask for it."""
    subject = names.Names().cancel("r1")
    assert refusal(signed(login(role), subject), subject) is None


def test_request_for_something_else_is_refused() -> None:
    """Subject, body and namespace are covered: nothing that was signed can be sent elsewhere."""
    headers = signed(login("operator"), RUN, b"{}")
    assert refusal(headers, DRAIN, b"{}") is Refusal.TAMPERED
    assert refusal(headers, RUN, b"[]") is Refusal.TAMPERED
    other = RequestGuard("other", ANCHORS)
    assert refusal(headers, RUN, b"{}", by=other) is Refusal.FOREIGN
    for header in (names.H_USER, names.H_ROLE, names.H_KEY, names.H_CERTIFICATES):
        assert refusal({**headers, header: "x"}, RUN, b"{}") is Refusal.FOREIGN
    for header in (names.H_EXPIRES, names.H_NONCE, names.H_SIGNATURE):
        assert refusal({**headers, header: "1"}, RUN, b"{}") is Refusal.TAMPERED


def test_login_of_another_account_is_refused() -> None:
    """A certificate counts only if this account's seed made it, for this namespace."""
    assert refusal(signed(login("operator", seed=AccountSeed(bytes(32))))) is Refusal.FOREIGN
    assert refusal(signed(login("operator", namespace="other"))) is Refusal.FOREIGN
    assert refusal(signed(login("operator", generations=(3,)))) is Refusal.FOREIGN


def test_unsigned_request_is_refused_where_keys_are_known() -> None:
    """Without keys everything passes, as in development; with them only for an upgrade."""
    assert refusal({}) is Refusal.UNSIGNED
    assert refusal({}, by=guard(accept_unsigned=True)) is None
    assert refusal({}, by=RequestGuard("hf", {})) is None
    forged = {**signed(login("client"), RUN)}
    assert refusal(forged, RUN, by=guard(accept_unsigned=True)) is Refusal.FORBIDDEN


def test_key_of_requests_is_not_the_key_of_the_login() -> None:
    """A server chooses what a client signs to log in: it must not be able to choose a request."""
    by = login("operator")
    assert names.H_KEY in signed(by)
    assert by.public_nkey not in repr(signed(by))


def test_logins_of_a_folder_are_certified_and_renewed(tmp_path: Path) -> None:
    """New logins can sign at once; older ones after `renew`, here or where they were carried."""
    folder = UserFolder(tmp_path / "auth")
    folder.init("hf")
    path = folder.credentials("operator")
    by = Credentials.load(path)
    one = RequestGuard("hf", by.anchors)
    assert refusal(signed(by), by=one) is None
    plain = Credentials(user=by.user, role=by.role, nkey_seed=by.nkey_seed)
    plain.save(path, replace=True)
    carried = tmp_path / "client.json"
    folder.credentials("client").rename(carried)
    renewed, absent = folder.renew([carried])
    assert {path, carried} <= set(renewed)
    assert absent == []
    assert refusal(signed(Credentials.load(path)), by=one) is None
    carried.unlink()
    assert folder.renew()[1] == ["client"]


def test_flood_of_refusals_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """What anybody can cause is logged once a minute, with how often it happened."""
    clock = FakeClock()
    sparse = Sparse(logging.getLogger("holdfast.test"), clock)
    for _ in range(1_000):
        sparse.warn("forged", "an ack was dropped: %s", "forged")
    assert len(caplog.records) == 1
    clock.advance(EVERY_SECONDS)
    sparse.warn("forged", "an ack was dropped: %s", "forged")
    assert "999 more" in caplog.records[1].getMessage()
