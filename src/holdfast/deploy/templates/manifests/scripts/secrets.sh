[% include "manifests/scripts/head.sh" %]
[%- for part in ("base", "agents") if part in parts %]
kubectl apply -f [[ part ]]/namespace.yaml
[%- endfor %]

DIR=$(cd "$OLDPWD" && cd "${1:?name the folder of: holdfast auth init --out DIR}" && pwd)
make_secret() {
  name=$1
  shift
  kubectl create secret generic "$name" --namespace "$NAMESPACE" "$@" \
    --dry-run=client --output=yaml | kubectl apply -f -
}
FROM=$DIR/credentials

make_secret nats-auth --from-file="$DIR/auth.conf"
make_secret holdfast-control --from-file=login.json="$FROM/control.json" --from-file="$DIR/account.seed"
make_secret holdfast-worker --from-file=login.json="$FROM/worker.json"
[%- if "web" in parts %]
make_secret holdfast-web --from-file=login.json="$FROM/web.json"
make_secret holdfast-web-tokens --from-file=tokens="$DIR/web-tokens"
[%- endif %]
[%- if "agents" in parts %]
NAMESPACE=[[ agents_namespace ]]
FILES=$(for file in "$FROM"/agent-*.json; do echo "--from-file=$file"; done)
# shellcheck disable=SC2086 # one word for each file
make_secret holdfast-agents $FILES
[%- endif %]
