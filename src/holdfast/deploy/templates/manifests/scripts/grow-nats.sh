[% include "manifests/scripts/head.sh" %]

# Kubernetes does not let a StatefulSet change its volumes. The claims are grown one by one (the storage
# class must allow it), the StatefulSet is replaced without its pods, and a rollout follows.
SIZE=[[ config.nats_volume_gib ]]Gi
for claim in $(kubectl get persistentvolumeclaims --namespace "$NAMESPACE" --output name | grep '/data-nats-'); do
  kubectl patch --namespace "$NAMESPACE" "$claim" --type merge --patch \
    "{\"spec\": {\"resources\": {\"requests\": {\"storage\": \"$SIZE\"}}}}"
done
kubectl delete statefulset nats --namespace "$NAMESPACE" --cascade=orphan --ignore-not-found
./apply.sh nats
