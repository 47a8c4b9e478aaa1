[% include "manifests/scripts/head.sh" %]

# Everything goes, the data too.
if [ "${1:-}" != "$NAMESPACE" ]; then
  echo "this deletes $NAMESPACE with every run, schedule and volume; say: ./clean.sh $NAMESPACE" >&2
  exit 1
fi
# KEDA's objects first, so that nothing scales what is going.
if kubectl get crd scaledobjects.keda.sh > /dev/null 2>&1; then
  kubectl delete scaledobjects --all --namespace "$NAMESPACE" --ignore-not-found
fi
kubectl delete validatingadmissionpolicy,validatingadmissionpolicybinding --ignore-not-found "$NAMESPACE-deployer"
kubectl delete namespace --ignore-not-found "$NAMESPACE"[% if "agents" in parts %] [[ agents_namespace ]][% endif %]
