"""What KEDA's `nats-jetstream` scaler does, step by step, as its documentation and source say.

It asks one monitor for the account's streams. On a cluster it then finds the server that leads
the consumer: it walks the addresses that `/varz` announces, on the monitor's own port, asks each
for its name, and takes the one whose name is the consumer's leader. Lag is `num_pending` plus
`num_ack_pending`; pods are `ceil(lag / threshold)` within the limits. A missing stream or consumer
is an error, and after three errors the fallback decides.
"""

from __future__ import annotations

import json
import math
import urllib.request
from dataclasses import dataclass
from typing import Any


class ScalerError(Exception):
    """The lag cannot be read."""


def _get(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return dict(json.loads(answer.read()))
    except OSError as error:
        raise ScalerError(f"{url}: {error}") from None


@dataclass(frozen=True)
class Jetstream:
    """One trigger of type `nats-jetstream`."""

    metadata: dict[str, str]

    def _jsz(self, host: str) -> dict[str, Any]:
        account = self.metadata["account"]
        return _get(f"http://{host}/jsz?acc={account}&consumers=true&config=true")

    def _consumer(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        for account in answer.get("account_details") or []:
            for stream in account.get("stream_detail") or []:
                wanted = account["name"], stream["name"]
                if wanted != (self.metadata["account"], self.metadata["stream"]):
                    continue
                for consumer in stream.get("consumer_detail") or []:
                    if consumer["name"] == self.metadata["consumer"]:
                        return dict(consumer)
        return None

    def lag(self) -> int:
        """What waits and what is in flight, as the consumer's leader says."""
        endpoint = self.metadata["natsServerMonitoringEndpoint"]
        answer = self._jsz(endpoint)
        found = self._consumer(answer)
        if answer.get("meta_cluster", {}).get("cluster_size", 1) > 1:
            found = self._of_leader(endpoint)
        if found is None:
            raise ScalerError(f"consumer {self.metadata['consumer']} is not there")
        return int(found["num_pending"]) + int(found["num_ack_pending"])

    def _of_leader(self, endpoint: str) -> dict[str, Any] | None:
        port = endpoint.rpartition(":")[2]
        for address in _get(f"http://{endpoint}/varz").get("connect_urls") or []:
            host = f"{address.split(':')[0]}:{port}"
            name = _get(f"http://{host}/varz")["server_name"]
            found = self._consumer(self._jsz(host))
            if found and found.get("cluster", {}).get("leader") == name:
                return found
        return None


@dataclass(frozen=True)
class MetricsApi:
    """One trigger of type `metrics-api`."""

    metadata: dict[str, str]

    def lag(self) -> int:
        """The number at `valueLocation` of what the address answers."""
        return int(_get(self.metadata["url"])[self.metadata["valueLocation"]])


def replicas(spec: dict[str, Any]) -> int:
    """How many pods a ScaledObject leads to: by its formula, or the trigger that wants most."""
    kinds: dict[str, Any] = {"nats-jetstream": Jetstream, "metrics-api": MetricsApi}
    wanted, lags = [], {}
    try:
        for number, trigger in enumerate(spec["triggers"]):
            metadata = trigger["metadata"]
            lag = kinds[trigger["type"]](metadata).lag()
            lags[trigger.get("name", str(number))] = lag
            threshold = int(metadata.get("lagThreshold") or metadata["targetValue"])
            wanted.append(math.ceil(lag / threshold))
        if modifiers := spec["advanced"].get("scalingModifiers"):
            total = sum(lags[name] for name in modifiers["formula"].split(" + "))
            wanted = [math.ceil(total / int(modifiers["target"]))]
    except ScalerError:
        return int(spec["fallback"]["replicas"])
    return min(max(max(wanted), spec["minReplicaCount"]), spec["maxReplicaCount"])
