"""Plans a push: what it would write, computed before anything is written. No I/O.

Unchanged items are not written: files compare by hash, secrets by fingerprint, boxes by opening
them. A changed secret gets a new version, `<revision>-<random>`, unique to this push; so boxes of
two versions coexist, and each manifest finds the ones it names.

Boxes of the snapshot in force, and of a push that may still be in progress, are kept until the new
snapshot is in force.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import SettingsError
from holdfast.names import settings_file_key, settings_manifest_key
from holdfast.settings.document import secret_id
from holdfast.settings.records import (
    FileEntry,
    Manifest,
    Revision,
    Sealed,
    SecretEntry,
    encode,
    sha256,
)
from holdfast.settings.sealing import Sealer
from holdfast.settings.store import Published
from holdfast.settings.tree import Tree

LARGEST_SEALED: Final = 512 * 1024
"""Per agent; as one message it must fit NATS's default limit of 1 MiB."""

Boxes = dict[str, dict[str, dict[int, bytes]]]


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
    needed: dict[str, dict[str, str]] = field(default_factory=dict)
    """The version of each secret an agent is entitled to, by agent."""
    generations: list[int] = field(default_factory=lambda: [1])
    sequence: int = 0
    """The expected KV revision when writing the new revision."""
    changes: list[tuple[str, str]] = field(default_factory=list)
    """What changed and how; shows no secret."""

    @property
    def empty(self) -> bool:
        return self.revision is None and not self.seal


def plan_push(
    tree: Tree, there: Published, sealer: Sealer, agents: Iterable[str], now: float
) -> Plan:
    """What it takes to make the server match a tree."""
    generations = there.revision.generations if there.revision else [1]
    plan = Plan(generations=generations, sequence=there.sequence)
    number = there.revision.number + 1 if there.revision else 1
    manifest = _manifest(tree, there.manifest, sealer, number)
    _note_files(plan, there.manifest, manifest)
    contents = {e.sha256: tree.files[n].text.encode() for n, e in manifest.files.items()}
    plan_snapshot(plan, there, manifest, contents, now)
    known = set(agents) | set(there.sealed)
    plan.needed = _needed(tree, manifest, known)
    if len(generations) > 1:  # a rotation is in progress: every agent gets new keys
        plan.needed = {agent: {} for agent in known} | plan.needed
    seal_for(plan, there, sealer, tree.secrets)
    return plan


def plan_snapshot(
    plan: Plan, there: Published, manifest: Manifest, contents: Mapping[str, bytes], now: float
) -> None:
    """Plan the writes that make a manifest current."""
    data = encode(manifest)
    hash = sha256(data)
    wanted = {settings_file_key(name): body for name, body in contents.items()}
    wanted[settings_manifest_key(hash)] = data
    plan.uploads = {key: body for key, body in wanted.items() if key not in there.contents}
    before = there.revision
    if before and before.manifest == hash and before.generations == plan.generations:
        if not plan.uploads:
            return
        plan.changes.append(("repaired", "files that were missing or tampered with"))
    kept = set(wanted) | _keys(there)
    plan.stale = sorted((set(there.contents) | there.stray) - kept)
    born, number = (before.born, before.number + 1) if before else (int(now), 1)
    plan.revision = Revision(born, number, hash, plan.generations, now)


def _keys(there: Published) -> set[str]:
    """The keys of the snapshot in force: agents may be reading it."""
    found = {settings_file_key(entry.sha256) for entry in there.manifest.files.values()}
    return found | ({settings_manifest_key(there.revision.manifest)} if there.revision else set())


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


def _needed(tree: Tree, manifest: Manifest, agents: set[str]) -> dict[str, dict[str, str]]:
    needed: dict[str, dict[str, str]] = {}
    for name, entry in manifest.files.items():
        if not entry.secrets:
            continue
        for agent in tree.top.entitled(name, agents):
            mine = needed.setdefault(agent, {})
            mine |= {secret_id(name, path): s.version for path, s in entry.secrets.items()}
    return needed


# ---------------------------------------------------------------- boxes


def seal_for(plan: Plan, there: Published, sealer: Sealer, values: Mapping[str, str]) -> None:
    """Seal what each agent needs and does not have yet; its other boxes stay for now."""
    fresh = 0
    for agent, wanted in sorted(plan.needed.items()):
        sequence, old = there.sealed.get(agent, (0, Sealed()))
        boxes: Boxes = {id: dict(versions) for id, versions in old.boxes.items()}
        count = 0
        for id, version in wanted.items():
            have = boxes.setdefault(id, {}).get(version, {})
            good = dict(have)
            for generation in plan.generations:
                if not _opens(sealer, agent, generation, id, version, have.get(generation)):
                    box = sealer.seal(agent, generation, id, version, values[id])
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
    sealed: Sealed, wanted: Mapping[str, str], generations: list[int], decided: int
) -> Sealed:
    """Drop the boxes that no snapshot needs.

    Boxes of a later revision than `decided` belong to a push in progress and stay.
    """
    boxes: Boxes = {}
    for id, versions in sealed.boxes.items():
        for version, by_generation in versions.items():
            if version == wanted.get(id):
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
