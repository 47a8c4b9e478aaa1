[% include "manifests/scripts/head.sh" %]

JOB=${1:?name a job: ./apply-job.sh NAME}
[ -d "jobs/$JOB" ] || { echo "error: there is no jobs/$JOB here" >&2; exit 1; }
# Consumers and schedules first: an autoscaler cannot read what does not exist.
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
