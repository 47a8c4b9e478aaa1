[% include "manifests/scripts/head.sh" %]

usage() {
  cat <<'TEXT'
./apply.sh [--dry-run] [--prune] [--overlay DIR] [--install-keda] [PART or JOB ...]

Applies everything, or only what is named, in the order of dependencies; waits for each rollout.
  --dry-run       let the server check everything; change nothing
  --prune         then delete what is in the cluster and no longer rendered (not with names)
  --overlay DIR   apply this kustomization; without: [[ overlay ]]
  --install-keda  install KEDA [[ keda_version ]] if there is none (KEDA_MANIFEST=FILE: from a copy of its release)
Parts: [[ parts | join(" ") ]]. Jobs: [[ jobs | join(" ") ]].
TEXT
}

fail() {
  echo "error: $*" >&2
  exit 1
}

KEDA_RELEASE=https://github.com/kedacore/keda/releases/download/v[[ keda_version ]]/keda-[[ keda_version ]].yaml
OVERLAY=[[ overlay ]]
DRY= PRUNE= KEDA= WANTED=
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) DRY=--dry-run=server ;;
    --prune) PRUNE=yes ;;
    --install-keda) KEDA=yes ;;
    --overlay) OVERLAY=$(cd "$OLDPWD" && cd "${2:?name a directory}" && pwd) && shift ;;
    -h | --help) usage && exit ;;
    -*) usage >&2 && exit 2 ;;
    *) WANTED="$WANTED $1" ;;
  esac
  shift
done
[ -d "$OVERLAY" ] || OVERLAY=.
ALL=$(mktemp -d)
trap 'rm -rf "$ALL"' EXIT
# Overlays change what is applied, so everything below reads what kustomize made of them.
kubectl kustomize "$OVERLAY" > "$ALL/all.yaml"

wanted() { [ -z "$WANTED" ] || case " $WANTED " in *" $1 "*) true ;; *) false ;; esac; }

# shellcheck disable=SC2086 # DRY is one word or none
apply() { kubectl apply $DRY --filename "$ALL/all.yaml" --selector "$1"; }

rolled_out() { [ -n "$DRY" ] || kubectl rollout status --namespace "$NAMESPACE" --timeout=10m "$1"; }

need() { kubectl get crd "$1" > /dev/null 2>&1 || fail "$2"; }

need_secret() {
  kubectl get secret --namespace "$1" "$2" > /dev/null 2>&1 || fail "the secret $1/$2 is missing: $3"
}

# Consumers and schedules first: an autoscaler cannot read what does not exist.
register() {
  if [ -n "$DRY" ]; then
    apply "holdfast.dev/job=$1,holdfast.dev/step=register"
    return
  fi
  kubectl delete job --namespace "$NAMESPACE" --ignore-not-found "$1-register"
  apply "holdfast.dev/job=$1,holdfast.dev/step=register"
  end=$(($(date +%s) + ${REGISTER_SECONDS:-300}))
  while :; do
    case $(kubectl get job --namespace "$NAMESPACE" "$1-register" \
      --output 'jsonpath={.status.conditions[?(@.status=="True")].type}') in
      *Complete*)
        kubectl logs --namespace "$NAMESPACE" --tail=50 --pod-running-timeout=1s "job/$1-register" || true # what it found
        return
        ;;
      *Failed*) break ;;
    esac
    [ "$(date +%s)" -lt "$end" ] || break
    sleep 1
  done
  kubectl logs --namespace "$NAMESPACE" --tail=50 --pod-running-timeout=1s "job/$1-register" >&2 || true
  fail "$1 was not registered: its workers and their scaling are left as they were"
}

preconditions() {
  kubectl get namespaces > /dev/null # a cluster answers, and lets us look
[%- if config.scaler != "hpa" %]
  if [ -n "$KEDA" ] && ! kubectl get crd scaledobjects.keda.sh > /dev/null 2>&1; then
[%- if config.keda_namespace != "keda" %]
    fail "a release of KEDA installs itself into the namespace keda: set keda_namespace, or install it yourself"
[%- else %]
    kubectl apply --server-side --filename "${KEDA_MANIFEST:-$KEDA_RELEASE}"
    kubectl wait --for=condition=Established --timeout=1m crd/scaledobjects.keda.sh
    for deployment in keda-operator keda-metrics-apiserver keda-admission; do
      kubectl rollout status --namespace keda --timeout=10m "deployment/$deployment"
    done
[%- endif %]
  fi
  need scaledobjects.keda.sh "KEDA is not installed: ./apply.sh --install-keda, or https://keda.sh/docs/latest/deploy/"
  version=$(kubectl get deployment --namespace [[ config.keda_namespace ]] keda-operator \
    --output 'jsonpath={.spec.template.spec.containers[0].image}' 2> /dev/null | sed 's/@.*//; s/.*://')
  at_least() { [ "$(printf '%s\n' "$1" "${version:-$2}" | sort -V | head -n 1)" = "$1" ]; }
[%- if config.scaler == "nats-jetstream" %]
  # Before 2.20 KEDA took a missing consumer for a full stream, and started as many workers as it may.
  at_least 2.20.0 0 ||
    fail "KEDA ${version:-unknown} miscounts missing consumers: 2.20 or newer, or scaler = \"metrics-api\""
[%- else %]
  at_least 2.17.0 2.17.0 || fail "KEDA $version is too old: 2.17 or newer is needed"
[%- endif %]
[%- endif %]
[%- if config.monitoring == "operator" %]
  need servicemonitors.monitoring.coreos.com \
    "the Prometheus operator is not installed: set monitoring = \"files\" in [deploy], or see https://prometheus-operator.dev"
[%- endif %]
[%- if config.secret_store %]
  need externalsecrets.external-secrets.io \
    "the External Secrets operator is not installed: see https://external-secrets.io/latest/introduction/getting-started"
[%- endif %]
[%- if config.gateway %]
  need httproutes.gateway.networking.k8s.io "the Gateway API is not installed: see https://gateway-api.sigs.k8s.io"
[%- endif %]
[%- if config.tls == "cert-manager" %]
  need certificates.cert-manager.io "cert-manager is not installed: see https://cert-manager.io/docs/installation"
[%- endif %]
}

# `holdfast deploy unregister` in the control plane, with options, the app, its group and its jobs.
unregister() { kubectl exec --namespace "$NAMESPACE" deployment/control -- holdfast deploy unregister "$@"; }

# Workers that run would make their consumers again. The autoscaler is paused, not deleted: should a run
# arrive now, the workers go on. (An HPA pauses by itself when there are no replicas.)
stop_workers() {
  if [ "$3" = paused ]; then
    kubectl annotate --namespace "$1" --overwrite "scaledobject/$2" autoscaling.keda.sh/paused-replicas=0
  fi
  kubectl scale --namespace "$1" --replicas=0 "deployment/$2"
  # As long as the longest grace period.
  kubectl wait --namespace "$1" --for=delete --timeout=65m pods --selector "app.kubernetes.io/name=$2"
}

start_workers() {
  if [ "$3" = paused ]; then
    kubectl annotate --namespace "$1" "scaledobject/$2" autoscaling.keda.sh/paused-replicas-
  else
    kubectl scale --namespace "$1" --replicas=1 "deployment/$2"
  fi
}

# Removed jobs lose their consumers and schedules, unless runs still wait for one of them: all are asked
# first, so that nothing is deleted when one refuses.
remove_consumers() {
  grep ' deployment\.apps/' "$ALL/gone" > "$ALL/workloads" || return 0
  while read -r space workload; do
    kubectl get --namespace "$space" "$workload" \
      --output 'jsonpath={.metadata.annotations.holdfast\.dev/serves}{"\n"}' > "$ALL/serves"
    read -r served < "$ALL/serves"
    [ -n "$served" ] || continue
    if grep -q "^$space scaledobject.keda.sh/${workload#*/}\$" "$ALL/gone"; then scaled=paused; else scaled=; fi
    echo "$space ${workload#*/} ${scaled:-kept} $served" >> "$ALL/removed"
  done < "$ALL/workloads"
  [ -s "$ALL/removed" ] || return 0
  # shellcheck disable=SC2086 # the app, its group and its jobs
  while read -r _ name _ served; do
    unregister --dry-run $served || fail "$name cannot be removed: nothing was deleted"
  done < "$ALL/removed"
  # shellcheck disable=SC2086
  while read -r space name scaled served; do
    stop_workers "$space" "$name" "$scaled"
    if ! unregister $served; then
      start_workers "$space" "$name" "$scaled"
      fail "$name cannot be removed, and goes on: none of its resources was deleted"
    fi
  done < "$ALL/removed"
}

# What the cluster has of this project and the files do not, into $ALL/gone: namespace and resource. By
# way of files, so that an error ends the script: an empty list would make everything look removed.
find_gone() {
  ours=app.kubernetes.io/managed-by=holdfast,app.kubernetes.io/part-of=[[ config.name ]]
  kinds=deployment,statefulset,daemonset,job,cronjob,service,serviceaccount,configmap,networkpolicy
  kinds=$kinds,poddisruptionbudget,horizontalpodautoscaler,ingress,role,rolebinding
  for extra in scaledobjects.keda.sh servicemonitors.monitoring.coreos.com prometheusrules.monitoring.coreos.com \
    externalsecrets.external-secrets.io httproutes.gateway.networking.k8s.io certificates.cert-manager.io; do
    if kubectl get crd "$extra" > /dev/null 2>&1; then kinds=$kinds,$extra; fi
  done
  kubectl create --dry-run=client --filename "$ALL/all.yaml" --output \
    'jsonpath={.metadata.namespace} {.kind} {.metadata.name}{"\n"}' > "$ALL/every"
  : > "$ALL/gone"
  for space in "$NAMESPACE" [[ agents_namespace ]]; do
    awk -v space="$space" '$1 == space { print tolower($2) "/" $3 }' "$ALL/every" | sort > "$ALL/rendered"
    if ! [ -s "$ALL/rendered" ]; then
      [ "$space" != "$NAMESPACE" ] || fail "nothing is rendered for $space: nothing is compared"
      # Without agents their namespace goes, with all that is in it.
      kubectl get namespaces --output name --selector "$ours" > "$ALL/spaces"
      if grep -qx "namespace/$space" "$ALL/spaces"; then echo "$space namespace/$space" >> "$ALL/gone"; fi
      continue
    fi
    kubectl get "$kinds" --namespace "$space" --output name --selector "$ours" > "$ALL/live"
    # KEDA makes HPAs with our labels, and removes them itself.
    sed '/\/keda-hpa-/d' "$ALL/live" | sort > "$ALL/found"
    # deployment.apps/web → deployment/web
    awk -F / '{ split($1, kind, "."); print kind[1] "/" $2, $0 }' "$ALL/found" | sort > "$ALL/named"
    join -v 1 "$ALL/named" "$ALL/rendered" | cut -d ' ' -f 2 | sed "s|^|$space |" >> "$ALL/gone"
  done
}

apply_job() {
  # What the job brings itself: the registration may need it, too.
  if [ -f "jobs/$1/extra.yaml" ]; then apply "holdfast.dev/job=$1,holdfast.dev/step=extra"; fi
  register "$1"
  apply "holdfast.dev/job=$1,holdfast.dev/step in (workers,scaling)"
  [ -z "$DRY" ] || return 0
  for workload in $(kubectl get deployments --namespace "$NAMESPACE" --output name \
    --selector "holdfast.dev/job=$1"); do
    rolled_out "$workload"
  done
}

[ -z "$PRUNE" ] || [ -z "$WANTED" ] || fail "--prune compares everything: leave out$WANTED"
for name in $WANTED; do
  case " [[ (parts + jobs) | join(" ") ]] " in
    *" $name "*) ;;
    *)
      case " [[ every_part | join(" ") ]] " in *" $name "*) ;; *) fail "there is no part or job $name" ;; esac
      echo "$name is switched off in [deploy]: skipped"
      ;;
  esac
done
# A pipeline that applies jobs may not read cluster-wide resources, and need not.
if [ -z "$WANTED" ]; then
  preconditions
fi

if wanted base; then
  apply holdfast.dev/part=namespace
  apply holdfast.dev/part=base
  # Claims, secrets from a store and the like, which jobs bring themselves.
  if ls jobs/*/admin.yaml > /dev/null 2>&1; then apply holdfast.dev/step=admin; fi
fi
[%- if config.secret_store %]
[%- if "agents" in parts %]
if wanted agents; then apply holdfast.dev/part=agents; fi # their secrets above all
[%- endif %]
if [ -z "$DRY$WANTED" ]; then
  kubectl wait externalsecrets.external-secrets.io --all --namespace "$NAMESPACE" --for=condition=Ready --timeout=2m ||
    fail "the secret store [[ config.secret_store ]] does not have every secret: kubectl get externalsecrets -n $NAMESPACE"
fi
[%- else %]
if [ -z "$DRY$WANTED" ]; then
[%- for space, secret in secrets %]
  need_secret [[ space ]] [[ secret ]] "./secrets.sh DIRECTORY makes it"
[%- endfor %]
[%- for secret in job_secrets %]
  need_secret "$NAMESPACE" [[ secret ]] "make it: jobs use it"
[%- endfor %]
fi
[%- endif %]
[%- set waits = {"nats": "statefulset/nats", "control": "deployment/control", "web": "deployment/web"} %]
[%- if "nats" in parts %]
if wanted nats; then
  size=$(kubectl get statefulset nats --namespace "$NAMESPACE" --ignore-not-found \
    --output 'jsonpath={.spec.volumeClaimTemplates[0].spec.resources.requests.storage}')
  [ "${size:-[[ config.nats_volume_gib ]]Gi}" = [[ config.nats_volume_gib ]]Gi ] ||
    fail "the volumes of NATS have $size and shall have [[ config.nats_volume_gib ]]Gi: ./grow-nats.sh"
fi
[%- endif %]
[%- for part in parts if part != "base" %]
if wanted [[ part ]]; then
  apply holdfast.dev/part=[[ part ]]
[%- if part in waits %]
  rolled_out [[ waits[part] ]]
[%- endif %]
fi
[%- endfor %]
for name in [[ jobs | join(" ") ]]; do
  if wanted "$name"; then apply_job "$name"; fi
done

if [ -z "$WANTED" ]; then
  find_gone
  if [ -n "$PRUNE" ] && [ -z "$DRY" ]; then
    remove_consumers
    while read -r space resource; do
      kubectl delete --namespace "$space" "$resource"
    done < "$ALL/gone"
  else
    sed 's/^/no longer rendered: /; s/$/ (--prune deletes it)/' "$ALL/gone"
  fi
fi
[ -n "$DRY" ] || echo "applied: 'holdfast doctor' says whether all is well"
