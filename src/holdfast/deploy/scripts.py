"""The scripts beside the manifests: they apply them in the order of their dependencies.

Each may be run again at any time. They stop at the first error, wait for every rollout, and never
skip the verification of a certificate or of a manifest.
"""

from __future__ import annotations

from holdfast.deploy.manifests import agents, control, nats, pods, web
from holdfast.deploy.project import Project

_HEAD = """\
#!/bin/sh
# Written by `holdfast deploy render`.
set -eu
cd "$(dirname "$0")"
NAMESPACE={namespace}
"""

_NEEDS = """
need() {
  kubectl get crd "$1" >/dev/null 2>&1 || { echo "error: $2" >&2; exit 1; }
}
need scaledobjects.keda.sh "KEDA is not installed: see https://keda.sh/docs/latest/deploy/"
need servicemonitors.monitoring.coreos.com \\
  "the Prometheus operator is not installed: see https://prometheus-operator.dev"
"""

_SECRETS = """
for secret in {secrets}; do
  kubectl get secret --namespace "${{secret%/*}}" "${{secret#*/}}" >/dev/null 2>&1 || {{
    echo "error: the secret $secret is missing: ./secrets.sh DIRECTORY makes all of them" >&2
    exit 1
  }}
done
"""

_SECRETS_HEAD = """
DIR=$(cd "$OLDPWD" && cd "${1:?name the folder of: holdfast auth init --out DIR}" && pwd)
make_secret() {
  name=$1
  shift
  kubectl create secret generic "$name" --namespace "$NAMESPACE" "$@" \\
    --dry-run=client --output=yaml | kubectl apply -f -
}
FROM=$DIR/credentials
"""

_APPLY_JOB = """
JOB=${1:?name a job: ./apply-job.sh NAME}
[ -d "jobs/$JOB" ] || { echo "error: there is no jobs/$JOB here" >&2; exit 1; }
# Consumers and schedules first: an autoscaler cannot read what is not there.
kubectl apply -f "jobs/$JOB/register.yaml"
REGISTRATION=$(kubectl get -f "jobs/$JOB/register.yaml" -o name | grep '^job.batch/')
kubectl wait --namespace "$NAMESPACE" --for=condition=complete --timeout=5m "$REGISTRATION" || {
  kubectl logs --namespace "$NAMESPACE" --tail=50 "$REGISTRATION" >&2
  echo "error: $JOB was not registered: its workers and their scaling are left as they were" >&2
  exit 1
}
kubectl apply -f "jobs/$JOB/workers.yaml"
kubectl apply -f "jobs/$JOB/scaling.yaml"
for workload in $(kubectl get -f "jobs/$JOB/workers.yaml" -o name | grep '^deployment'); do
  kubectl rollout status --namespace "$NAMESPACE" --timeout=10m "$workload"
done
"""


_CLEAN = """
# Everything goes, the data too.
if [ "${1:-}" != "$NAMESPACE" ]; then
  echo "this deletes $NAMESPACE with every run, schedule and volume; say: ./clean.sh $NAMESPACE" >&2
  exit 1
fi
"""


def secrets(project: Project, parts: list[str]) -> list[str]:
    """The secrets that pods need before they can start, each with its namespace."""
    found = [nats.AUTH, pods.secret_of(control.NAME), pods.secret_of("worker")]
    if "web" in parts:
        found += [pods.secret_of(web.NAME), web.TOKENS]
    others = []
    if "agents" in parts:
        others = [f"{pods.agents_namespace(project)}/{agents.SECRET}"]
    return [f"{project.config.namespace}/{name}" for name in found] + others


def scripts(project: Project, parts: list[str], jobs: list[str]) -> dict[str, str]:
    """The scripts by their names."""
    head = _HEAD.format(namespace=project.config.namespace)
    found = {"apply-job.sh": head + _APPLY_JOB}
    if parts:
        found["setup.sh"] = head + _setup(project, parts, jobs)
        found["secrets.sh"] = head + _make_secrets(project, parts)
        found["clean.sh"] = head + _clean(project, parts)
    return found


def _setup(project: Project, parts: list[str], jobs: list[str]) -> str:
    waits = {
        "nats": f"statefulset/{nats.NAME}",
        "control": f"deployment/{control.NAME}",
        "web": f"deployment/{web.NAME}",
    }
    lines = [_NEEDS, "kubectl apply -k base"]
    if "agents" in parts:  # its namespace must be there before its secret can be
        lines.append("kubectl apply -f agents/namespace.yaml")
    lines.append(_SECRETS.format(secrets=" ".join(secrets(project, parts))))
    for part in parts[1:]:
        lines.append(f"kubectl apply -k {part}")
        if part in waits:
            lines.append(f'kubectl rollout status -n "$NAMESPACE" --timeout=10m {waits[part]}')
    lines += [f"./apply-job.sh {job}" for job in jobs]
    lines.append('echo "everything is applied: holdfast doctor tells whether it is well"')
    return "\n".join(lines) + "\n"


def _clean(project: Project, parts: list[str]) -> str:
    """KEDA's objects first, so that nothing scales what is going."""
    agents_too = f" {pods.agents_namespace(project)}" if "agents" in parts else ""
    return (
        f'{_CLEAN}kubectl delete scaledobjects --all --namespace "$NAMESPACE" --ignore-not-found\n'
        f'kubectl delete namespace --ignore-not-found "$NAMESPACE"{agents_too}\n'
    )


def _make_secrets(project: Project, parts: list[str]) -> str:
    """Secrets from the folder of `holdfast auth init`, and from `web-tokens` in it."""
    spaces = [f"kubectl apply -f {p}/namespace.yaml" for p in ("base", "agents") if p in parts]
    lines = [*spaces, _SECRETS_HEAD, f'make_secret {nats.AUTH} --from-file="$DIR/auth.conf"']
    for role in (control.NAME, "worker", *(["web"] if "web" in parts else [])):
        seed = ' --from-file="$DIR/account.seed"' if role == control.NAME else ""
        lines.append(
            f'make_secret {pods.secret_of(role)} --from-file=login.json="$FROM/{role}.json"{seed}'
        )
    if "web" in parts:
        lines.append(f'make_secret {web.TOKENS} --from-file=tokens="$DIR/web-tokens"')
    if "agents" in parts:
        lines += [
            f"NAMESPACE={pods.agents_namespace(project)}",
            'FILES=$(for file in "$FROM"/agent-*.json; do echo "--from-file=$file"; done)',
            "# shellcheck disable=SC2086 # one word for each file",
            f"make_secret {agents.SECRET} $FILES",
        ]
    return "\n".join(lines) + "\n"
