"""Plans a push: what it would write, computed before anything is written. No I/O.

Unchanged items are not written: files compare by hash, secrets by fingerprint, boxes by opening
them. A changed secret gets a new version, `<revision>-<random>`, unique to this push; so boxes of
two versions coexist, and each manifest finds the ones it names.

A *box* is a secret sealed for one agent. Boxes of the snapshot in force, and of a push that may
still be in progress, are kept until the new snapshot is in force. Files, manifests and revisions of
the last `KEPT` pushes stay, and so do their secrets, sealed to the account: `plan_return` brings
any of them back as a new revision.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import SettingsError
from holdfast.names import (
    settings_file_key,
    settings_history_key,
    settings_manifest_key,
    settings_secret_key,
)
from holdfast.settings.document import secret_id
from holdfast.settings.records import (
    FileEntry,
    Manifest,
    Revision,
    Sealed,
    SecretEntry,
    SettingsCanary,
    encode,
    sha256,
)
from holdfast.settings.sealing import AT_REST, Sealer
from holdfast.settings.store import Published
from holdfast.settings.top import NAME as TOP
from holdfast.settings.top import Top
from holdfast.settings.tree import Tree

LARGEST_SEALED: Final = 512 * 1024
"""Bytes of an agent's sealed secrets: as one message they must fit NATS's default limit of 1
MiB."""

MOST_CANARIES: Final = 1_000
"""Most agents of a canary: their ids are in the revision, which every agent receives."""
KEPT: Final = 10
"""Revisions that 'rollback' can return to. Only their differences take space."""

Boxes = dict[str, dict[str, dict[int, bytes]]]
Needs = dict[str, set[tuple[str, str]]]
"""The secrets an agent is entitled to, as pairs of id and version, by agent."""


@dataclass
class Plan:
    """What a push would write, and a summary for people."""

    revision: Revision | None = None
    """The new revision; None if the snapshot does not change."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Files and the manifest, by key."""
    stale: list[str] = field(default_factory=list)
    """Keys that neither the old nor the new snapshot needs."""
    seal: dict[str, tuple[int, Sealed]] = field(default_factory=dict)
    """Records to write before the switch, by agent, each with its expected KV revision."""
    needed: Needs = field(default_factory=dict)
    generations: list[int] = field(default_factory=lambda: [1])
    sequence: int = 0
    """The expected KV revision when writing the new revision."""
    changes: list[tuple[str, str]] = field(default_factory=list)
    """What changed and how; shows no secret."""

    @property
    def empty(self) -> bool:
        return self.revision is None and not self.seal


def plan_push(
    tree: Tree,
    there: Published,
    sealer: Sealer,
    agents: Iterable[str],
    now: float,
    wave: tuple[Sequence[str], float] | None = None,
) -> Plan:
    """The plan to make the server match a tree; `wave`: only for these agents, until that time."""
    check_undecided(there, now)
    plan = _begun(there)
    number = there.revision.number + 1 if there.revision else 1
    manifest = _manifest(tree, there.manifest, sealer, number)
    _note_files(plan, there.manifest, manifest)
    contents = {e.sha256: tree.files[n].text.encode() for n, e in manifest.files.items()}
    values = {
        (secret_id(name, path), entry.version): tree.files[name].secrets[path]
        for name, file in manifest.files.items()
        for path, entry in file.secrets.items()
    }
    known = set(agents) | set(there.sealed)
    plan.needed = _needed(tree.top, manifest, known)
    canary = None
    if wave is not None:
        canary = SettingsCanary(sha256(encode(manifest)), *_checked_wave(there, *wave))
        if canary.manifest == there.kept().manifest:
            return Plan(generations=plan.generations, sequence=there.sequence)  # nothing to try
        values = _secret_values(there, sealer, there.manifest) | values
        for agent, more in _needed(_top(there), there.manifest, set(there.sealed)).items():
            plan.needed.setdefault(agent, set()).update(more)
    _plan_snapshot(plan, there, manifest, contents, now, canary=canary)
    _keep_secrets(plan, there, sealer, values)
    _seal(plan, there, sealer, known, values)
    return plan


def plan_return(
    there: Published, sealer: Sealer, agents: Iterable[str], number: int, now: float
) -> Plan:
    """The plan to make an earlier revision's content current again, as a new revision.

    Number 0 undoes the last change: it ends a canary in progress, or returns to the previous
    snapshot.
    """
    current = there.kept()
    if number == 0:
        number = _before(there, current, now)
    back = there.kept(number)
    return plan_kept(there, sealer, agents, back.manifest, now, back_to=number)


def plan_decision(
    there: Published, sealer: Sealer, agents: Iterable[str], now: float, promote: bool
) -> Plan:
    """The plan to give a canary's snapshot to every agent, or to roll it back."""
    tried = there.kept()
    if promote and tried.canary:
        return plan_kept(there, sealer, agents, tried.canary.manifest, now)
    return plan_kept(there, sealer, agents, tried.manifest, now, back_to=tried.number)


def plan_kept(
    there: Published,
    sealer: Sealer,
    agents: Iterable[str],
    hash: str,
    now: float,
    *,
    back_to: int = 0,
    generations: list[int] | None = None,
) -> Plan:
    """The plan to publish a kept manifest, for these generations of keys."""
    plan = _begun(there)
    plan.generations = generations or plan.generations
    manifest = there.snapshot(hash)
    contents = {manifest.files[n].sha256: t.encode() for n, t in there.texts(manifest).items()}
    values = _secret_values(there, sealer, manifest)
    _note_files(plan, there.manifest, manifest)
    _plan_snapshot(plan, there, manifest, contents, now, back_to=back_to)
    known = set(agents) | set(there.sealed)
    plan.needed = _needed(_top(there, manifest), manifest, known)
    _keep_secrets(plan, there, sealer, values)
    _seal(plan, there, sealer, known, values)
    return plan


def _begun(there: Published) -> Plan:
    generations = there.revision.generations if there.revision else [1]
    return Plan(generations=generations, sequence=there.sequence)


def _before(there: Published, current: Revision, now: float) -> int:
    if current.on_trial(now):
        return current.number
    for number in sorted(there.history, reverse=True):
        if there.history[number].manifest != current.manifest:
            return number
    raise SettingsError("no earlier snapshot is kept: there is nothing to go back to")


def check_undecided(there: Published, now: float) -> None:
    """Refuse to publish while a canary is in progress."""
    canary = there.revision.on_trial(now) if there.revision else None
    if canary is not None:
        raise SettingsError(
            f"revision {there.kept().number} is being tried on {len(canary.agents)} agents for "
            f"{canary.until - now:.0f} more seconds: wait for its end, or roll it back with "
            "'holdfast settings rollback'",
            reason="conflict",
        )


def _checked_wave(there: Published, agents: Sequence[str], until: float) -> tuple[list[str], float]:
    if there.revision is None:
        raise SettingsError(
            "nothing is published yet, and a canary needs a snapshot to go back to: push without "
            "--canary"
        )
    if not 1 <= len(agents) <= MOST_CANARIES:
        raise SettingsError(
            f"a canary is tried on 1 to {MOST_CANARIES:,} agents, not {len(agents):,}"
        )
    return sorted(agents), until


def _top(there: Published, manifest: Manifest | None = None) -> Top:
    manifest = there.manifest if manifest is None else manifest
    if TOP not in manifest.files:
        return Top(())
    only = Manifest({TOP: manifest.files[TOP]})
    return Top.parse(there.texts(only)[TOP])


def _plan_snapshot(
    plan: Plan,
    there: Published,
    manifest: Manifest,
    contents: Mapping[str, bytes],
    now: float,
    *,
    canary: SettingsCanary | None = None,
    back_to: int = 0,
) -> None:
    """Plan the writes that make a manifest current, or give it to a canary's agents."""
    data = encode(manifest)
    hash = sha256(data)
    wanted = {settings_file_key(name): body for name, body in contents.items()}
    wanted[settings_manifest_key(hash)] = data
    plan.uploads = {key: body for key, body in wanted.items() if key not in there.contents}
    before = there.revision
    same = before and before.manifest == hash and before.generations == plan.generations
    if before and same and not before.canary:
        if not plan.uploads:
            return
        plan.changes.append(("repaired", "files that were missing or tampered with"))
    born, number = (before.born, before.number + 1) if before else (int(now), 1)
    current = before.manifest if before and canary else hash
    plan.revision = Revision(born, number, current, plan.generations, now, back_to, canary)
    kept = set(wanted) | _keys(there, number)
    plan.stale = sorted((set(there.contents) | there.stray) - kept)
    if before and settings_history_key(before.number) not in there.contents:
        plan.uploads[settings_history_key(before.number)] = there.signed


def _keys(there: Published, number: int) -> set[str]:
    """The keys of the last snapshots: those that can be restored, and the one that agents may be
    reading."""
    found: set[str] = set()
    for revision in there.history.values():
        if revision.number <= number - KEPT:
            continue
        found.add(settings_history_key(revision.number))
        for hash in (revision.manifest, revision.canary.manifest if revision.canary else ""):
            if settings_manifest_key(hash) not in there.contents:
                continue
            found.add(settings_manifest_key(hash))
            for file in there.snapshot(hash).files.values():
                found.add(settings_file_key(file.sha256))
                found |= {settings_secret_key(s.version) for s in file.secrets.values()}
    return found


def _keep_secrets(
    plan: Plan, there: Published, sealer: Sealer, values: Mapping[tuple[str, str], str]
) -> None:
    """Store each secret sealed to the account, to be able to seal it for agents again."""
    if plan.revision is None:
        return
    for (id, version), value in values.items():
        key = settings_secret_key(version)
        if _at_rest(there, sealer, id, version) != value:
            plan.uploads[key] = sealer.seal_at_rest(id, value).encode()
        if key in plan.stale:
            plan.stale.remove(key)


def _at_rest(there: Published, sealer: Sealer, id: str, version: str) -> str | None:
    text = there.contents.get(settings_secret_key(version), b"").decode("utf-8", "replace")
    try:
        return sealer.open_at_rest(id, text) if text.startswith(AT_REST) else None
    except SettingsError:
        return None


def _secret_values(
    there: Published, sealer: Sealer, manifest: Manifest
) -> dict[tuple[str, str], str]:
    """The secrets of a kept snapshot, opened by the account that sealed them."""
    found = {}
    for name, file in manifest.files.items():
        for path, entry in file.secrets.items():
            id, version = secret_id(name, path), entry.version
            value = _at_rest(there, sealer, id, version)
            value = _from_boxes(there, sealer, id, version) if value is None else value
            if value is None:
                raise SettingsError(
                    f"secret {id} of that snapshot is no longer kept: push a folder instead",
                    reason="secret",
                )
            found[id, version] = value
    return found


def _from_boxes(there: Published, sealer: Sealer, id: str, version: str) -> str | None:
    for agent, (_, sealed) in there.sealed.items():
        for generation, box in sealed.boxes.get(id, {}).get(version, {}).items():
            try:
                return sealer.open(agent, generation, id, version, box)
            except SettingsError:
                continue
    return None


def _manifest(tree: Tree, before: Manifest, sealer: Sealer, number: int) -> Manifest:
    files = {}
    for name, source in tree.files.items():
        old = before.files.get(name)
        body = source.text.encode()
        found = {}
        for path, value in source.secrets.items():
            fingerprint = sealer.fingerprint(secret_id(name, path), value)
            entry = old.secrets.get(path) if old else None
            if entry is None or entry.fingerprint != fingerprint:
                entry = SecretEntry(f"{number}-{secrets.token_hex(6)}", fingerprint)
            found[path] = entry
        files[name] = FileEntry(sha256(body), len(body), found)
    return Manifest(files)


def _note_files(plan: Plan, before: Manifest, after: Manifest) -> None:
    for name in sorted(before.files.keys() | after.files.keys()):
        old, new = before.files.get(name), after.files.get(name)
        if old is None:
            plan.changes.append(("added", f"{name}.yaml"))
        elif new is None:
            plan.changes.append(("removed", f"{name}.yaml"))
        elif old.sha256 != new.sha256:
            plan.changes.append(("changed", f"{name}.yaml"))
        was, now = (old.secrets if old else {}), (new.secrets if new else {})
        for path in sorted(was.keys() | now.keys()):
            how = "removed" if path not in now else "added" if path not in was else "changed"
            if was.get(path) != now.get(path):
                plan.changes.append((how, f"secret {secret_id(name, path)}"))


def _needed(top: Top, manifest: Manifest, agents: set[str]) -> Needs:
    needed: Needs = {}
    for name, entry in manifest.files.items():
        if not entry.secrets:
            continue
        for agent in top.entitled(name, agents):
            mine = needed.setdefault(agent, set())
            mine |= {(secret_id(name, path), s.version) for path, s in entry.secrets.items()}
    return needed


# ---------------------------------------------------------------- boxes


def _seal(
    plan: Plan,
    there: Published,
    sealer: Sealer,
    known: Iterable[str],
    values: Mapping[tuple[str, str], str],
) -> None:
    """Seal what each agent needs and does not have yet; its other boxes stay for now."""
    if len(plan.generations) > 1:  # a rotation is in progress: every agent gets new keys
        plan.needed = {agent: set() for agent in known} | plan.needed
    fresh = 0
    for agent, wanted in sorted(plan.needed.items()):
        sequence, old = there.sealed.get(agent, (0, Sealed()))
        boxes: Boxes = {id: dict(versions) for id, versions in old.boxes.items()}
        count = 0
        for id, version in sorted(wanted):
            have = boxes.setdefault(id, {}).get(version, {})
            good = dict(have)
            for generation in plan.generations:
                if not _opens(sealer, agent, generation, id, version, have.get(generation)):
                    box = sealer.seal(agent, generation, id, version, values[id, version])
                    good[generation] = box
                    count += 1
            boxes[id][version] = good
        keys = _keys_for(plan, sealer, agent, old)
        if count or keys != old.keys:
            plan.seal[agent] = sequence, _checked(agent, Sealed(boxes, keys))
            fresh += bool(count)
    if fresh:
        plan.changes.append(("sealed", f"secrets for {fresh} agent{'s' if fresh > 1 else ''}"))


def _keys_for(plan: Plan, sealer: Sealer, agent: str, old: Sealed) -> dict[int, bytes]:
    """During a rotation: the new generation's keys, sealed to the old ones."""
    if len(plan.generations) < 2:
        return {}
    before, after = plan.generations
    return {after: old.keys.get(after) or sealer.seal_keys(agent, before, after)}


def _opens(
    sealer: Sealer, agent: str, generation: int, id: str, version: str, box: bytes | None
) -> bool:
    if box is None:
        return False
    try:
        sealer.open(agent, generation, id, version, box)
    except SettingsError:
        return False
    return True


def _checked(agent: str, sealed: Sealed) -> Sealed:
    size = len(encode(sealed))
    if size > LARGEST_SEALED:
        raise SettingsError(
            f"the secrets of agent {agent} have {size:,} bytes when sealed and the limit is "
            f"{LARGEST_SEALED:,}: put large ones elsewhere and keep the key to them here"
        )
    return sealed


def pruned(
    sealed: Sealed, wanted: set[tuple[str, str]], generations: list[int], decided: int
) -> Sealed:
    """Drop the boxes that no snapshot needs.

    Boxes of a later revision than `decided` belong to a push in progress and stay.
    """
    boxes: Boxes = {}
    for id, versions in sealed.boxes.items():
        for version, by_generation in versions.items():
            if (id, version) in wanted:
                kept = {g: box for g, box in by_generation.items() if g in generations}
            elif _number(version) > decided:
                kept = dict(by_generation)
            else:
                continue
            boxes.setdefault(id, {})[version] = kept
    return Sealed(boxes, sealed.keys if len(generations) > 1 else {})


def _number(version: str) -> int:
    head = version.partition("-")[0]
    return int(head) if head.isdigit() else 0
