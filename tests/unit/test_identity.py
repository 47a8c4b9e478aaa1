"""Keys, credentials and signatures: who can say what, without a server."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import names
from holdfast.errors import ConfigError, InvalidInput
from holdfast.identity.commands import (
    Command,
    CommandRefused,
    CommandSigner,
    CommandVerifier,
    Refusal,
)
from holdfast.identity.credentials import AgentCredentials, Credentials
from holdfast.identity.framing import framed
from holdfast.identity.reports import ReportSigner, ReportVerifier
from holdfast.identity.seed import AccountSeed

SEED = AccountSeed(bytes(range(32)))
NOW = 1_800_000_000.0

GOLDEN_VERIFY = "c8c90f387e5356d69d5dc427f52ee555e67bf9d72164477a07468620d306184e"
GOLDEN_SEALING = "855ae9313adda3de89a900cd9cb871680fad21a83454004c5192eac6e9c9d983"
GOLDEN_REPORT = "309d127fac35ae3db3d56e67d98c15477b83bef4acf0f27ced7b62b77afb6ba3"
GOLDEN_SIGNATURE = (
    "29f1ddcc93de55a2.W5zC+wH8Vo6oT1atiqNmULfVaeJwvMxjwhm"
    "JKQ/xfULkvizSXM5Y7/FJFq1h3FZ3NxHzD4QJRjXW6+lnwB2YBQ=="
)


def command(**changes: object) -> dict[str, object]:
    plain = {"kind": "exec", "agent": "web1", "run": "r1", "epoch": 7, "payload": b"{}"}
    return {**plain, "expires": NOW + 60, **changes}


def signed(seed: AccountSeed = SEED, generation: int = 1, **changes: object) -> dict[str, str]:
    return CommandSigner(seed.signing_key(generation)).sign(**command(**changes))  # type: ignore[arg-type]


def verifier(agent: str = "web1", generations: tuple[int, ...] = (1,)) -> CommandVerifier:
    return CommandVerifier(agent, SEED.agent_keys(agent, generations).verify.values())


def refusal(
    headers: dict[str, str],
    payload: bytes = b"{}",
    kind: str = "exec",
    by: CommandVerifier | None = None,
    now: float = NOW,
) -> Refusal:
    with pytest.raises(CommandRefused) as refused:
        (by or verifier()).verify(headers, payload, kind=kind, now=now)
    return refused.value.reason


# ---- the account seed


def test_seed_is_private_and_kept(tmp_path: Path) -> None:
    """A seed's file is for its owner only, whatever the umask, and gives the same keys again."""
    path = tmp_path / "auth" / "account.seed"
    before = os.umask(0)
    try:
        made = AccountSeed.create(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert AccountSeed.load(path).verify_key() == made.verify_key()
    assert list(path.parent.iterdir()) == [path]


def test_seed_is_not_overwritten(tmp_path: Path) -> None:
    """A second `create` on the same path changes nothing and says what to do."""
    path = tmp_path / "account.seed"
    AccountSeed.create(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        AccountSeed.create(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o610])
def test_seed_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    """A looser mode is refused with the command that repairs it."""
    path = tmp_path / "account.seed"
    AccountSeed.create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        AccountSeed.load(path)


@pytest.mark.parametrize("content", [b"", b"00" * 31, b"zz" * 32, b"\xff\xfe" * 40])
def test_seed_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file with something else is told as such, without showing it."""
    path = tmp_path / "account.seed"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="seed"):
        AccountSeed.load(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        AccountSeed.load(tmp_path / "none")


def test_seed_is_in_no_text() -> None:
    """Neither the seed nor what is derived from it shows in a `repr`."""
    issued = SEED.issue("web1")
    for text in (repr(SEED), repr(issued), repr(issued.keys), f"{issued}"):
        assert issued.nkey_seed not in text
        assert bytes(range(32)).hex() not in text
        assert repr(issued.keys.report[1]) not in text


def test_keys_differ_by_purpose_agent_and_generation() -> None:
    """No two derived keys are the same, and each is the same every time."""
    keys = [bytes(SEED.signing_key(g)) for g in (1, 2)]
    keys += [bytes(SEED.sealing_key(a, g)) for a in ("web1", "web2") for g in (1, 2)]
    keys += [SEED.report_key(a, g) for a in ("web1", "web2") for g in (1, 2)]
    keys += [AccountSeed(bytes(32)).report_key("web1")]
    assert len(set(keys)) == len(keys)
    again = AccountSeed(bytes(32))
    assert again.report_key("web1", 2) == AccountSeed(bytes(32)).report_key("web1", 2)
    assert again.report_key("web1", 2) != SEED.report_key("web1", 2)


def test_keys_stay_the_same_over_versions() -> None:
    """Golden values: a new version must derive what an old one derived."""
    assert SEED.verify_key().hex() == GOLDEN_VERIFY
    assert bytes(SEED.sealing_key("web1")).hex() == GOLDEN_SEALING
    assert SEED.report_key("web1").hex() == GOLDEN_REPORT
    assert signed()[names.H_SIGNATURE_2] == GOLDEN_SIGNATURE


@pytest.mark.parametrize("generation", [0, -1, 2**32, True])
def test_generation_that_is_none_is_refused(generation: int) -> None:
    """Generations count from 1."""
    with pytest.raises(InvalidInput):
        SEED.verify_key(generation)


@pytest.mark.parametrize("agent", ["", "a.b", "*", ">", "a b", "x" * 65, "agent/1", "ä"])
def test_agent_name_that_could_widen_a_subject_is_refused(agent: str) -> None:
    """An agent's id is one plain subject token, or it gets no credentials."""
    with pytest.raises(InvalidInput):
        SEED.issue(agent)


# ---- credentials


def test_credentials_round_trip(tmp_path: Path) -> None:
    """What was saved is loaded again, by the agent and by whoever only logs in."""
    path = tmp_path / "web1.json"
    issued = SEED.issue("web1", generations=(1, 2))
    issued.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert AgentCredentials.load(path) == issued
    login = Credentials.load(path)
    assert (login.user, login.role, login.inbox) == (
        "agent-web1",
        "agent",
        "_INBOX.agents.agent-web1",
    )
    assert login.public_nkey.startswith("U")


def test_credentials_hold_nothing_of_others(tmp_path: Path) -> None:
    """In an agent's file is neither the seed, nor the signing key, nor another agent's key."""
    path = tmp_path / "web1.json"
    SEED.issue("web1").save(path)
    content = path.read_bytes()
    others = [bytes(range(32)), bytes(SEED.signing_key()), SEED.report_key("web2")]
    others += [bytes(SEED.sealing_key("web2"))]
    for key in others:
        assert key not in content
        assert key.hex().encode() not in content
    keys = AgentCredentials.load(path).keys
    held = {key for by in (keys.verify, keys.sealing, keys.report) for key in by.values()}
    assert not held & set(others)


def test_credentials_are_replaced_only_when_asked(tmp_path: Path) -> None:
    """A second issue does not silently take the place of the first."""
    path = tmp_path / "web1.json"
    SEED.issue("web1").save(path)
    with pytest.raises(ConfigError, match="exists"):
        SEED.issue("web1").save(path)
    second = SEED.issue("web1")
    second.save(path, replace=True)
    assert AgentCredentials.load(path) == second
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        AgentCredentials.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"user":"worker","role":"worker","nkey_seed":"x"}',
        b'{"user":"a.b","role":"worker","nkey_seed":"SUAG6CYEDEIXYI2WXOSM7QFJKOOHDF23PBUNGXE6WDIMNCDJ5WPA4L4EUY"}',
        b"\xff\xff",
    ],
)
def test_credentials_that_are_none_are_refused(tmp_path: Path, content: bytes) -> None:
    """A file with something else is told as such."""
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    for kind in (Credentials, AgentCredentials):
        with pytest.raises(ConfigError, match="issue it again"):
            kind.load(path)


# ---- commands


def test_command_passes_once() -> None:
    """A genuine command is returned, and its repeat is refused."""
    one, headers = verifier(), signed()
    found = one.verify(headers, b"{}", kind="exec", now=NOW)
    assert found == Command("exec", "web1", "r1", 7, NOW + 60, b"{}")
    assert refusal(headers, by=one) is Refusal.REPLAYED


def test_command_without_signature_is_refused() -> None:
    """Neither a message without headers nor one without the signature is a command."""
    headers = signed()
    del headers[names.H_SIGNATURE_2]
    assert refusal({}) is Refusal.UNSIGNED
    assert refusal(headers) is Refusal.UNSIGNED


def test_command_of_another_account_is_refused() -> None:
    """Another seed's signature counts for nothing, also under the name of our key."""
    headers = signed(seed=AccountSeed(bytes(32)))
    assert refusal(headers) is Refusal.FOREIGN
    ours = signed()[names.H_SIGNATURE_2].split(".")[0]
    headers[names.H_SIGNATURE_2] = ours + "." + headers[names.H_SIGNATURE_2].split(".")[1]
    assert refusal(headers) is Refusal.TAMPERED


def test_command_for_another_agent_is_refused() -> None:
    """What was signed for web2 is refused by web1, and cannot be re-addressed."""
    headers = signed(agent="web2")
    assert refusal(headers) is Refusal.WRONG_AGENT
    assert refusal({**headers, names.H_AGENT: "web1"}) is Refusal.TAMPERED


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (names.H_RUN, "r2"),
        (names.H_EPOCH, "8"),
        (names.H_EPOCH, "7 "),
        (names.H_EPOCH, "٧"),
        (names.H_EXPIRES, "9" * 20),
        (names.H_EXPIRES, ""),
        (names.H_RUN, "\ud800"),
    ],
)
def test_command_with_a_changed_field_is_refused(header: str, value: str) -> None:
    """Every signed field counts."""
    assert refusal({**signed(), header: value}) is Refusal.TAMPERED


def test_command_with_another_payload_or_kind_is_refused() -> None:
    """A cancel is no exec, and other arguments are another command."""
    assert refusal(signed(), payload=b'{"a":1}') is Refusal.TAMPERED
    assert refusal(signed(kind="cancel")) is Refusal.TAMPERED
    assert refusal(signed(), kind="cancel") is Refusal.TAMPERED


def test_command_expires() -> None:
    """At its expiry a command is refused, and expired ones are forgotten."""
    assert refusal(signed(), now=NOW + 60) is Refusal.EXPIRED
    one = verifier()
    one.verify(signed(), b"{}", kind="exec", now=NOW)
    one.verify(signed(run="r2", expires=NOW + 999), b"{}", kind="exec", now=NOW + 100)
    assert len(one._seen) == 1
    assert refusal(signed(), by=one, now=NOW) is Refusal.EXPIRED


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_command_with_any_other_signature_is_refused(text: bytes) -> None:
    """No made-up signature passes, and none raises anything else."""
    headers = signed()
    ours = headers[names.H_SIGNATURE_2].split(".")[0]
    for made_up in (
        text.decode("latin-1"),
        f"{ours}.{text.decode('latin-1')}",
        f"{ours}.{'A' * 86}==",
    ):
        assert refusal({**headers, names.H_SIGNATURE_2: made_up}) in set(Refusal) - {
            Refusal.EXPIRED,
            Refusal.REPLAYED,
        }


def test_generations_overlap() -> None:
    """While a generation is rolled out, an agent that has both accepts both."""
    both = verifier(generations=(1, 2))
    for generation in (1, 2):
        both.verify(signed(generation=generation), b"{}", kind="exec", now=NOW)
    assert refusal(signed(generation=3), by=both) is Refusal.FOREIGN
    assert refusal(signed(generation=2), by=verifier()) is Refusal.FOREIGN


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 8))
def test_replay_cache_is_bounded_and_forgets_nothing_that_is_good(
    expiries: list[int], limit: int
) -> None:
    """However small the cache, no command passes twice."""
    one = CommandVerifier("web1", [SEED.verify_key()], remembered=limit)
    passed: list[dict[str, str]] = []
    for number, seconds in enumerate(expiries):
        headers = signed(run=f"r{number}", expires=NOW + seconds)
        try:
            one.verify(headers, b"{}", kind="exec", now=NOW)
            passed.append(headers)
        except CommandRefused:
            assert refusal(headers, by=one) is Refusal.EXPIRED
        assert len(one._seen) <= limit
    for headers in passed:
        assert refusal(headers, by=one) in (Refusal.REPLAYED, Refusal.EXPIRED)


@settings(deadline=None)
@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_framing_can_be_read_in_one_way_only(one: list[str], other: list[str]) -> None:
    """Two different lists never give the same bytes."""
    assert (framed(b"p", *one) == framed(b"p", *other)) == (one == other)


# ---- reports


def test_report_is_the_agents_own() -> None:
    """A return passes under the agent that made it, for its run and its bytes only."""
    verify = ReportVerifier(SEED.report_key, (1, 2)).verify
    headers = ReportSigner(SEED.issue("web1")).sign(kind="return", run="r1", payload=b"ok")
    verify(headers, b"ok", kind="return", agent="web1", run="r1")
    for change in ({"agent": "web2"}, {"run": "r2"}, {"kind": "ack"}):
        given = {"kind": "return", "agent": "web1", "run": "r1", **change}
        with pytest.raises(CommandRefused) as refused:
            verify(headers, b"ok", **given)
        assert refused.value.reason is Refusal.TAMPERED
    with pytest.raises(CommandRefused):
        verify(headers, b"no", kind="return", agent="web1", run="r1")


def test_report_without_a_signature_or_of_another_generation_is_refused() -> None:
    """A message that was directed to the subject by others carries no code that fits."""
    verify = ReportVerifier(SEED.report_key).verify
    for headers, reason in (
        ({}, Refusal.UNSIGNED),
        ({names.H_SIGNATURE: "2.00"}, Refusal.FOREIGN),
        ({names.H_SIGNATURE: "1.ä"}, Refusal.TAMPERED),
        ({names.H_SIGNATURE: "1"}, Refusal.TAMPERED),
    ):
        with pytest.raises(CommandRefused) as refused:
            verify(headers, b"", kind="return", agent="web1", run="r1")
        assert refused.value.reason is reason
