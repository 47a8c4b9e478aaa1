[% include "manifests/scripts/head.sh" %]

# Makes every secret that pods need from the folder of `holdfast auth init`. Run it again after a change
# there: NATS reloads its users by itself, other pods read their files when they start
# (kubectl rollout restart).
DIR=$(cd "$OLDPWD" && cd "${1:?name the folder of: holdfast auth init --out DIR}" && pwd)
FROM=$DIR/credentials
[%- for part in ("base", "agents") if part in parts %]
kubectl apply --filename [[ part ]]/namespace.yaml
[%- endfor %]

make_secret() {
  space=$1
  name=$2
  shift 2
  kubectl create secret generic "$name" --namespace "$space" "$@" \
    --dry-run=client --output=yaml | kubectl apply --filename -
}
[%- if "backup" in parts %]
[ -f "$DIR/backup-store.env" ] || {
  echo "error: $DIR/backup-store.env is missing: OBJECTS_KEY=… and OBJECTS_SECRET=…, one on each line" >&2
  exit 1
}
[ -f "$FROM/snapshot.json" ] || {
  echo "error: the login of backups is missing: holdfast auth user snapshot --dir $DIR" >&2
  exit 1
}
[%- endif %]
[% if config.tls == "files" %]
[%- if "nats" in parts %]
./certificates.sh "$DIR"
make_secret "$NAMESPACE" nats-tls --from-file="$DIR/tls/tls.crt" --from-file="$DIR/tls/tls.key" \
  --from-file="$DIR/tls/ca.crt"
[%- else %]
[ -f "$DIR/tls/ca.crt" ] || {
  echo "error: $DIR/tls/ca.crt is missing: put the authority there that signed the certificate of your" \
    "NATS, or set tls = \"off\" in [deploy] if every image trusts it anyway" >&2
  exit 1
}
[%- endif %]
for space in [[ (namespaces + config.clients) | join(" ") ]]; do
  make_secret "$space" holdfast-ca --from-file="$DIR/tls/ca.crt"
done
[%- endif %]
[%- if "nats" in parts %]
make_secret "$NAMESPACE" nats-auth --from-file="$DIR/auth.conf"
[%- endif %]
make_secret "$NAMESPACE" holdfast-control \
  --from-file=login.json="$FROM/control.json" --from-file="$DIR/account.seed"
make_secret "$NAMESPACE" holdfast-worker --from-file=login.json="$FROM/worker.json"
[%- if "web" in parts %]
make_secret "$NAMESPACE" holdfast-web --from-file=login.json="$FROM/web.json"
make_secret "$NAMESPACE" holdfast-web-tokens --from-file=tokens="$DIR/web-tokens"
[%- endif %]
[%- if "backup" in parts %]
make_secret "$NAMESPACE" holdfast-backup --from-file=login.json="$FROM/snapshot.json"
make_secret "$NAMESPACE" holdfast-backup-store --from-env-file="$DIR/backup-store.env"
[%- endif %]
[%- for space in config.clients %]
make_secret [[ space ]] holdfast-client --from-file=login.json="$FROM/client.json"
[%- endfor %]
[%- if "agents" in parts %]
FILES=$(for file in "$FROM"/agent-*.json; do echo "--from-file=$file"; done)
# shellcheck disable=SC2086 # one word for each file
make_secret [[ agents_namespace ]] holdfast-agents $FILES
[%- endif %]
[%- if "nats" not in parts %]
echo "include $DIR/auth.conf in the configuration of your NATS, and let it reload"
[%- endif %]
