[% include "manifests/scripts/head.sh" %]

# An authority of your own and the certificate of the nats-servers, in DIRECTORY/tls. Files that exist
# are kept: remove tls.crt to renew the certificate, and run secrets.sh again.
DIR=$(cd "$OLDPWD" && cd "${1:?name the folder of: holdfast auth init --out DIR}" && pwd)/tls
mkdir -p "$DIR"
umask 077
key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2> /dev/null; }
if ! [ -f "$DIR/ca.crt" ]; then
  key "$DIR/ca.key"
  openssl req -x509 -new -sha256 -days 3650 -key "$DIR/ca.key" -out "$DIR/ca.crt" \
    -subj "/CN=[[ config.name ]] authority" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi
if ! [ -f "$DIR/tls.crt" ]; then
  key "$DIR/tls.key"
  openssl req -new -key "$DIR/tls.key" -subj "/CN=nats.[[ namespace ]].svc" -out "$DIR/tls.csr"
  # Servers are each other's clients. 825 days: the most that some clients accept.
  cat > "$DIR/tls.ext" <<'TEXT'
subjectAltName=[% for name in nats_names %]DNS:[[ name ]],[% endfor %]DNS:localhost
extendedKeyUsage=serverAuth,clientAuth
keyUsage=critical,digitalSignature
TEXT
  openssl x509 -req -sha256 -days 825 -in "$DIR/tls.csr" -CA "$DIR/ca.crt" -CAkey "$DIR/ca.key" \
    -CAcreateserial -extfile "$DIR/tls.ext" -out "$DIR/tls.crt" 2> /dev/null
  rm -f "$DIR/tls.csr" "$DIR/tls.ext"
fi
echo "$DIR: valid until $(openssl x509 -noout -enddate -in "$DIR/tls.crt" | cut -d = -f 2)"
