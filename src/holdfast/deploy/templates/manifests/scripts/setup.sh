[% include "manifests/scripts/head.sh" %]

need() {
  kubectl get crd "$1" >/dev/null 2>&1 || { echo "error: $2" >&2; exit 1; }
}
need scaledobjects.keda.sh "KEDA is not installed: see https://keda.sh/docs/latest/deploy/"
need servicemonitors.monitoring.coreos.com \
  "the Prometheus operator is not installed: see https://prometheus-operator.dev"

kubectl apply -k base
[%- if "agents" in parts %]
kubectl apply -f agents/namespace.yaml
[%- endif %]

for secret in [[ secrets | join(" ") ]]; do
  kubectl get secret --namespace "${secret%/*}" "${secret#*/}" >/dev/null 2>&1 || {
    echo "error: the secret $secret is missing: ./secrets.sh DIRECTORY makes all of them" >&2
    exit 1
  }
done
[%- set waits = {"nats": "statefulset/nats", "control": "deployment/control", "web": "deployment/web"} %]
[%- for part in parts if part != "base" %]
kubectl apply -k [[ part ]]
[%- if part in waits %]
kubectl rollout status -n "$NAMESPACE" --timeout=10m [[ waits[part] ]]
[%- endif %]
[%- endfor %]
[%- for job in jobs %]
./apply-job.sh [[ job ]]
[%- endfor %]
echo "everything is applied: holdfast doctor tells whether it is well"
