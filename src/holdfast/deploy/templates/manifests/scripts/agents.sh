[% include "manifests/scripts/head.sh" %]

# Logins for the agents of machines that have none yet: run it after machines were added. Their agents
# wait for it; NATS reloads its users by itself.
DIR=$(cd "$OLDPWD" && cd "${1:?name the folder of: holdfast auth init --out DIR}" && pwd)
NEW=
for machine in $(kubectl get nodes --output 'jsonpath={.items[*].metadata.name}'); do
  name=$(echo "$machine" | tr . -)
  [ -f "$DIR/credentials/agent-$name.json" ] || NEW="$NEW $name"
done
if [ -z "$NEW" ]; then
  echo "every machine has a login"
  exit
fi
# shellcheck disable=SC2086 # one word for each machine
holdfast auth agent --dir "$DIR" $NEW
./secrets.sh "$DIR"
