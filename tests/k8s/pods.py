"""A machine that runs the pods of an API server as processes: what a kubelet and KEDA would do.

Each pod has its own network namespace with its own address, its own root (an overlay over this
machine's, read-only if the manifest says so) with its volumes at their paths, its environment,
its user and its signals. Readiness decides about rollouts as Kubernetes does: with `maxSurge: 1`
and `maxUnavailable: 0`. ScaledObjects are asked of the control plane as KEDA asks.

An image is this machine with the project's files: `images` maps the last part of an image's name to
the files that its Dockerfile copies. Needs root and iproute2. Not played: DaemonSets, sidecars.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.k8s.cluster import Cluster

Resource = dict[str, Any]
NET = f"10.{100 + os.getpid() % 150}"
"""The pods' addresses: of no use outside this machine, and another test's are others."""
BIN = Path(sys.prefix) / "bin"
NEEDED = {Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix)}
"""Of this machine, in every pod: Holdfast, its environment and its Python."""
TICK = 0.3
PAUSED = "autoscaling.keda.sh/paused-replicas"
"""KEDA's annotation of a ScaledObject that keeps its target at a number."""


@dataclass
class Image:
    """What an image's Dockerfile makes: files at places, and how it starts."""

    copies: dict[str, Path] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = (str(BIN / "holdfast"),)


@dataclass
class Pod:
    """One pod: its process, and what was observed of it."""

    name: str
    owner: str
    space: str
    template: Resource
    mark: str
    address: str
    folder: Path
    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    stopping: bool = False
    killed: bool = False
    ready: bool = False

    @property
    def container(self) -> Resource:
        return self.template["spec"]["containers"][0]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def port(self, wanted: int | str) -> int:
        ports = {p["name"]: p["containerPort"] for p in self.container.get("ports") or []}
        return ports[wanted] if isinstance(wanted, str) else wanted

    def probe(self) -> bool:
        """Whether it passes its readiness probe now."""
        probe = self.container.get("readinessProbe", {}).get("httpGet")
        if probe is None:
            return self.running
        url = f"http://{self.address}:{self.port(probe['port'])}{probe['path']}"
        headers = {h["name"]: h["value"] for h in probe.get("httpHeaders") or []}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=3):
                return self.running
        except OSError:
            return False

    def inside(self, *words: str) -> list[str]:
        """A command in the pod, as `kubectl exec` runs it."""
        enter = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--root", "--wd=/"]
        env = [f"{name}={value}" for name, value in self.environment.items()]
        user = self.template["spec"]["securityContext"]["runAsUser"]
        drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [*enter, *drop, "env", "-i", *env, *words]


class Machine:
    """Runs what the API server has, until it is closed."""

    def __init__(self, cluster: Cluster, folder: Path, images: Callable[[str], Image]) -> None:
        self.cluster = cluster
        self.folder = folder
        self.images = images
        self.pods: list[Pod] = []
        self.ended: list[Pod] = []
        self.jobs: dict[str, tuple[Pod, int]] = {}
        self.gateway = f"{NET}.0.1"
        self._bridge = f"hf{os.getpid() % 1_000_000}"
        self._addresses: dict[str, str] = {}
        self._idle: dict[str, float] = {}
        self._asked = 0.0
        self._started = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._stops: list[threading.Thread] = []
        self.error: BaseException | None = None

    # ---- the API

    def get(self, path: str) -> Resource:
        return json.loads(self.cluster.kubectl("get", "--raw", path))

    def _items(self, path: str) -> list[Resource]:
        code, said = self.cluster.run("kubectl", "get", "--raw", path)
        return json.loads(said).get("items", []) if code == 0 else []

    def _patch(self, item: Resource, kind: str, body: Resource, sub: str = "status") -> None:
        where = ("-n", item["metadata"]["namespace"], kind, item["metadata"]["name"])
        words = [f"--subresource={sub}"] if sub else []
        self.cluster.run(
            "kubectl", "patch", *where, *words, "--type=merge", "-p", json.dumps(body)
        )  # fmt: skip

    # ---- life

    def __enter__(self) -> Machine:
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.gateway}/16", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        for pod in self.pods:
            if pod.running:
                pod.process.kill()
        for thread in self._stops:
            thread.join()
        for pod in (*self.pods, *self.ended):
            pod.process.wait()
        for name in list(self._addresses):
            run("ip", "netns", "delete", _netns(name), check=False)
        run("ip", "link", "delete", self._bridge, check=False)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(TICK):
                self._tick()
        except BaseException as error:
            self.error = error
            raise

    def _tick(self) -> None:
        with self._lock:
            for pod in self.pods:
                pod.ready = not pod.stopping and pod.probe()
        sets = self._items("/apis/apps/v1/statefulsets")
        deployments = self._items("/apis/apps/v1/deployments")
        for item in sets:
            self._stateful(item)
        for item in deployments:
            self._deployment(item)
        for item in self._items("/apis/batch/v1/jobs"):
            self._job(item)
        known = {_owner(item) for item in (*sets, *deployments)}
        for pod in list(self.pods):
            if pod.owner not in known and not pod.owner.startswith("Job/"):
                self.stop(pod)
        if time.monotonic() > self._asked + 2:
            self._asked = time.monotonic()
            for item in self._items("/apis/keda.sh/v1alpha1/scaledobjects"):
                self._scale(item, deployments)

    # ---- workloads

    def of(self, owner: str) -> list[Pod]:
        """The pods of a workload that are not told to stop."""
        return [pod for pod in self.pods if pod.owner == owner and not pod.stopping]

    def _deployment(self, item: Resource) -> None:
        owner, template = _owner(item), item["spec"]["template"]
        mark, wanted = _mark(template), item["spec"].get("replicas", 1)
        pods = self.of(owner)
        for pod in [p for p in pods if not p.running]:  # a container that ended is started again
            self._forget(pod)
        pods = self.of(owner)
        new = [p for p in pods if p.mark == mark]
        old = [p for p in pods if p.mark != mark]
        if len(new) < wanted and len(pods) < wanted + 1:
            self._start(item, owner, template, mark)
        elif len(new) > wanted:
            self.stop(min(new, key=lambda p: p.ready))
        elif (old and sum(p.ready for p in pods) > wanted) or (old and not wanted):
            self.stop(old[0])
        new = [p for p in self.of(owner) if p.mark == mark]
        counts = {
            "replicas": len(self.of(owner)),
            "updatedReplicas": len(new),
            "readyReplicas": sum(p.ready for p in self.of(owner)),
            "availableReplicas": sum(p.ready for p in self.of(owner)),
            "observedGeneration": item["metadata"]["generation"],
        }
        now = item.get("status", {})
        if any(now.get(key, 0) != value for key, value in counts.items()):
            self._patch(item, "deployment", {"status": counts})

    def _stateful(self, item: Resource) -> None:
        owner, template = _owner(item), item["spec"]["template"]
        mark, wanted = _mark(template), item["spec"].get("replicas", 1)
        for pod in [p for p in self.of(owner) if not p.running]:
            self._forget(pod)
        there = {p.name: p for p in self.pods if p.owner == owner}
        for number in range(wanted):
            name = f"{item['metadata']['name']}-{number}"
            if name not in there:
                self._start(item, owner, template, mark, name)
        old = [p for p in self.of(owner) if p.mark != mark]
        if old and all(p.ready for p in self.of(owner)):
            self.stop(max(old, key=lambda p: p.name))
        pods = self.of(owner)
        counts: Resource = {
            "replicas": len(pods),
            "readyReplicas": sum(p.ready for p in pods),
            "availableReplicas": sum(p.ready for p in pods),
            "updatedReplicas": sum(p.mark == mark for p in pods),
            "currentRevision": mark,
            "updateRevision": mark,
            "observedGeneration": item["metadata"]["generation"],
        }
        now = item.get("status", {})
        if any(now.get(key, 0) != value for key, value in counts.items()):
            self._patch(item, "statefulset", {"status": counts})

    def _job(self, item: Resource) -> None:
        owner = f"Job/{item['metadata']['uid']}"
        if item.get("status", {}).get("conditions"):
            return
        template = item["spec"]["template"]
        if owner not in self.jobs:
            self.jobs[owner] = (self._start(item, owner, template, _mark(template)), 0)
            return
        pod, failures = self.jobs[owner]
        if pod.running:
            return
        self._forget(pod)
        code = pod.process.returncode
        if code and failures < item["spec"].get("backoffLimit", 6):
            self.jobs[owner] = (self._start(item, owner, template, _mark(template)), failures + 1)
            return
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        kinds = ("FailureTarget", "Failed") if code else ("SuccessCriteriaMet", "Complete")
        conditions = [{"type": k, "status": "True", "lastTransitionTime": when} for k in kinds]
        ended = {} if code else {"completionTime": when}
        status = {"startTime": when, "conditions": conditions, **ended}
        self._patch(item, "job", {"status": status})

    def _scale(self, item: Resource, deployments: list[Resource]) -> None:
        """Ask for the lag as KEDA does, and set the replicas as it does."""
        spec, space = item["spec"], item["metadata"]["namespace"]
        [trigger] = spec["triggers"]
        found = [p for p in self.of(f"Deployment/{space}/control") if p.ready]
        target = next(
            (
                d
                for d in deployments
                if d["metadata"]["namespace"] == space
                and d["metadata"]["name"] == spec["scaleTargetRef"]["name"]
            ),
            None,
        )
        if not found or target is None:
            return
        url = trigger["metadata"]["url"].replace(
            f"control.{space}.svc.cluster.local", found[0].address
        )
        try:
            with urllib.request.urlopen(url, timeout=3) as answer:
                lag = json.loads(answer.read())["lag"]
            wanted = math.ceil(lag / int(trigger["metadata"]["targetValue"]))
        except OSError:
            wanted = spec["fallback"]["replicas"]
        wanted = min(max(wanted, spec.get("minReplicaCount", 0)), spec["maxReplicaCount"])
        if paused := (item["metadata"].get("annotations") or {}).get(PAUSED):
            wanted = int(paused)
        key, now = f"{space}/{item['metadata']['name']}", time.monotonic()
        if wanted:
            self._idle[key] = now
        elif not paused and now < self._idle.get(key, 0) + spec["cooldownPeriod"]:
            wanted = 1
        if target["spec"].get("replicas", 1) != wanted:
            self._patch(target, "deployment", {"spec": {"replicas": wanted}}, sub="")

    # ---- pods

    def stop(self, pod: Pod) -> None:
        """Pre-stop hook, SIGTERM, grace period, SIGKILL."""
        if pod.stopping:
            return
        pod.stopping, pod.ready = True, False
        thread = threading.Thread(target=self._stop, args=(pod,))
        self._stops.append(thread)
        thread.start()

    def _stop(self, pod: Pod) -> None:
        deadline = time.monotonic() + pod.template["spec"]["terminationGracePeriodSeconds"]
        hook = pod.container.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            self._stopping.wait(hook["sleep"]["seconds"])
        elif "exec" in hook and pod.running:
            subprocess.run(pod.inside(*hook["exec"]["command"]), capture_output=True)
        if pod.running:
            pod.process.send_signal(signal.SIGTERM)
        while pod.running and time.monotonic() < deadline and not self._stopping.is_set():
            time.sleep(0.05)
        if pod.running:
            pod.killed = not self._stopping.is_set()
            pod.process.kill()
        pod.process.wait()
        self._forget(pod)

    def _forget(self, pod: Pod) -> None:
        with self._lock:
            if pod in self.pods:
                self.pods.remove(pod)
                self.ended.append(pod)

    def _address(self, name: str) -> str:
        """A pod's address: its own network, reached through the bridge."""
        if name not in self._addresses:
            number = len(self._addresses) + 2
            address = f"{NET}.{number // 250}.{number % 250 + 1}"
            space, near, far = _netns(name), f"{self._bridge}v{number}", f"eth{number}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
            run("ip", "link", "set", near, "master", self._bridge, "up")
            for words in (
                f"addr add {address}/16 dev {far}",
                f"link set {far} up",
                "link set lo up",
                f"route add default via {self.gateway}",
            ):
                run("ip", "-n", space, *words.split())
            self._addresses[name] = address
        return self._addresses[name]

    def _start(
        self, item: Resource, owner: str, template: Resource, mark: str, name: str = ""
    ) -> Pod:
        space = item["metadata"]["namespace"]
        name = name or f"{item['metadata']['name']}-{os.urandom(3).hex()}"
        self._started += 1
        folder = self.folder / space / f"{self._started:03}-{name}"
        folder.mkdir(parents=True)
        container = template["spec"]["containers"][0]
        image = self.images(container["image"].rpartition("/")[2])
        environment = {
            "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/",
            "LANG": "C.UTF-8",
        }
        environment |= image.environment | self._environment(container, space, name)
        mounts = self._volumes(template, item, space, name, folder)
        words = [
            re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), word)
            for word in [
                *(container.get("command") or image.entrypoint),
                *(container.get("args") or []),
            ]
        ]
        address = self._address(f"{space}/{name}")
        (folder / "hosts").write_text(self._hosts(space))
        script = _script(
            folder, container, mounts, image, template["spec"]["securityContext"], words
        )
        (folder / "start.sh").write_text(script)
        net = f"--net=/run/netns/{_netns(f'{space}/{name}')}"
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                ["nsenter", net, "unshare", "--mount", "sh", str(folder / "start.sh")],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        pod = Pod(name, owner, space, template, mark, address, folder, process, environment)
        with self._lock:
            self.pods.append(pod)
        return pod

    def _hosts(self, space: str) -> str:
        """The cluster's DNS: servers of NATS under their names, and their service."""
        lines = ["127.0.0.1 localhost"]
        for number in range(3):
            names = f"nats-{number}.nats-headless.{space}.svc.cluster.local"
            service = f" nats nats.{space}.svc nats.{space}.svc.cluster.local" if not number else ""
            lines.append(f"{self._address(f'{space}/nats-{number}')} {names}{service}")
        return "\n".join(lines) + "\n"

    def _data(self, kind: str, space: str, name: str) -> dict[str, bytes]:
        found = self.get(f"/api/v1/namespaces/{space}/{kind}/{name}")
        if kind == "secrets":
            return {k: base64.b64decode(v) for k, v in (found.get("data") or {}).items()}
        return {k: v.encode() for k, v in (found.get("data") or {}).items()}

    def _environment(self, container: Resource, space: str, pod: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom") or []:
            kind, ref = (
                ("secrets", source["secretRef"])
                if "secretRef" in source
                else ("configmaps", source["configMapRef"])
            )
            found |= {k: v.decode() for k, v in self._data(kind, space, ref["name"]).items()}
        for one in container.get("env") or []:
            origin = one.get("valueFrom") or {}
            if "fieldRef" in origin:
                found[one["name"]] = pod
            elif ref := origin.get("secretKeyRef") or origin.get("configMapKeyRef"):
                kind = "secrets" if "secretKeyRef" in origin else "configmaps"
                found[one["name"]] = self._data(kind, space, ref["name"])[ref["key"]].decode()
            else:
                text = str(one.get("value", ""))
                found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found.get(m[1], m[0]), text)
        return found

    def _volumes(
        self, template: Resource, item: Resource, space: str, pod: str, folder: Path
    ) -> dict[str, Path]:
        """The pod's volumes as directories, by name."""
        found: dict[str, Path] = {}
        for volume in template["spec"].get("volumes") or []:
            path = folder / "volumes" / volume["name"]
            path.mkdir(parents=True)
            for source in [volume, *volume.get("projected", {}).get("sources", [])]:
                for kind, key in (("secrets", "secret"), ("configmaps", "configMap")):
                    if key not in source:
                        continue
                    name = source[key].get("secretName") or source[key]["name"]
                    data = self._data(kind, space, name)
                    items = source[key].get("items")
                    named = {i["path"]: data[i["key"]] for i in items} if items else data
                    for file, body in named.items():
                        (path / file).parent.mkdir(parents=True, exist_ok=True)
                        (path / file).write_bytes(body)
                        (path / file).chmod(source[key].get("defaultMode", 0o644))
            found[volume["name"]] = path
        user = template["spec"]["securityContext"]["runAsUser"]
        for path in found.values():
            os.chown(path, user, user)
            for one in path.rglob("*"):  # a secret's files are the group's, not the user's
                os.chown(one, 0 if one.is_file() else user, user)
        for claim in item["spec"].get("volumeClaimTemplates") or []:
            name = claim["metadata"]["name"]
            found[name] = self.folder / space / f"{name}-{pod}"
            found[name].mkdir(parents=True, exist_ok=True)
            os.chown(found[name], user, user)
        return found


def _script(
    folder: Path,
    container: Resource,
    mounts: dict[str, Path],
    image: Image,
    security: Resource,
    words: list[str],
) -> str:
    """Builds the pod's root and becomes its process."""
    root = folder / "root"
    layers = f"lowerdir=/,upperdir={root}/upper,workdir={root}/work"
    lines = [
        "set -e",
        "mount --make-rprivate /",
        f"mkdir -p {root} && mount -t tmpfs tmpfs {root}",
        f"mkdir {root}/upper {root}/work {root}/all && chmod 755 {root}",
        f"mount -t overlay overlay -o {layers} {root}/all",
        f"mount --rbind /proc {root}/all/proc && mount --rbind /dev {root}/all/dev",
        f"cp {folder}/hosts {root}/all/etc/hosts",
        f"chmod 755 {root}/all/root",  # where a Python may be that the pod's user has to start
    ]
    for target, source in image.copies.items():
        lines.append(f"mkdir -p {root}/all{target} && cp -r {source}/. {root}/all{target}")
    for mount in container.get("volumeMounts") or []:
        place = f"{root}/all{os.path.realpath(mount['mountPath'])}"  # /var/run is a link
        lines.append(f"mkdir -p {place} && mount --bind {mounts[mount['name']]} {place}")
    lines += [  # a volume at /tmp would hide a checkout below it
        f"mkdir -p {root}/all{path} && mount --bind {path} {root}/all{path}" for path in NEEDED
    ]
    if container["securityContext"]["readOnlyRootFilesystem"]:
        lines.append(f"mount -o remount,ro {root}/all")
    user = security["runAsUser"]
    drop = f"setpriv --reuid {user} --regid {user} --clear-groups --no-new-privs"
    run_ = " ".join(shlex.quote(word) for word in words)
    start = "/app" if "/app" in image.copies else "/"
    inner = shlex.quote(f"cd {start} && exec {drop} {run_}")
    lines.append(f"exec /usr/sbin/chroot {root}/all sh -c {inner}")
    return "\n".join(lines) + "\n"


def _owner(item: Resource) -> str:
    meta = item["metadata"]
    kind = "StatefulSet" if "volumeClaimTemplates" in item["spec"] else "Deployment"
    return f"{kind}/{meta['namespace']}/{meta['name']}"


def _mark(template: Resource) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _netns(name: str) -> str:
    return f"hf-{os.getpid()}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def run(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"{words}: {done.stderr}"


@contextlib.contextmanager
def command_line(machine: Machine, space: str, folder: Path) -> Iterator[dict[str, str]]:
    """`kubectl` as people have it: with `exec`, and `wait` for pods, which need a kubelet."""
    del space
    real = shutil.which("kubectl")
    tool = folder / "bin" / "kubectl"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys, time\n"
        "words = sys.argv[1:]\n"
        "def read():\n"
        f"    return json.load(open({str(folder / 'pods.json')!r}))\n"
        "if words[:1] == ['exec']:\n"
        "    space = words[words.index('--namespace') + 1]\n"
        "    name = next(w for w in words if w.startswith('deployment/'))\n"
        "    enter = read()['ready'][f'{space}/{name}']\n"
        "    os.execvp(enter[0], [*enter, *words[words.index('--') + 1:]])\n"
        "if words[:1] == ['wait'] and 'pods' in words:\n"
        "    space = words[words.index('--namespace') + 1]\n"
        "    name = words[words.index('--selector') + 1].partition('=')[2]\n"
        "    while f'{space}/deployment/{name}' in read()['running']:\n"
        f"        time.sleep({TICK})\n"
        "    sys.exit()\n"
        f"os.execv({real!r}, ['kubectl', *words])\n"
    )
    tool.chmod(0o755)
    stopping = threading.Event()

    def tell() -> None:
        while not stopping.wait(TICK):
            pods = [
                (f"{pod.space}/deployment/{pod.owner.rpartition('/')[2]}", pod)
                for pod in list(machine.pods)
            ]
            ready = {name: pod.inside() for name, pod in pods if pod.ready}
            found = {"ready": ready, "running": [name for name, _ in pods]}
            target = folder / "pods.json"
            target.with_suffix(".new").write_text(json.dumps(found))
            target.with_suffix(".new").rename(target)

    (folder / "pods.json").write_text('{"ready": {}, "running": []}')
    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield {
            "PATH": f"{tool.parent}:{BIN}:{os.environ['PATH']}",
            "KUBECONFIG": machine.cluster.config("admin"),
        }
    finally:
        stopping.set()
        thread.join()
