"""KEDA's own kinds against schemas: a published package's, and ours, which knows no other field.

The validators of the npm package `@kubernetes-models/keda` 2.0.0 come from KEDA 2.19, whose
ScaledObject is that of 2.20. They check types and required fields, and let unknown fields pass, as
Kubernetes would drop them. So a strict schema of our own, written from KEDA's documentation,
refuses those. Where npm cannot fetch the package, ours stands alone, and the report says so.
`make k8s` applies them with KEDA's own definitions.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.unit.deployment import one, rendered

PACKAGE = "@kubernetes-models/keda@2.0.0"
CACHE = Path(tempfile.gettempdir()) / "holdfast-test-keda-2.0.0"
VALIDATOR = "ComGithubKedacoreKedaV2ApisKedaV1alpha1ScaledObject.js"
INSTALL_SECONDS = 90

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
NUMBER = {"type": "integer", "minimum": 0}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "additionalProperties": False,
        "properties": properties,
    }


JETSTREAM = {
    **_closed(
        ["natsServerMonitoringEndpoint", "account", "stream", "consumer"],
        natsServerMonitoringEndpoint={"type": "string", "pattern": r"^[a-z0-9.-]+:\d+$"},
        account={"type": "string", "minLength": 1},
        stream={"type": "string", "minLength": 1},
        consumer={"type": "string", "minLength": 1},
        lagThreshold={"type": "string", "pattern": r"^\d+$"},
        activationLagThreshold={"type": "string", "pattern": r"^\d+$"},
        useHttps={"enum": ["true", "false"]},
    )
}
METRICS_API = _closed(
    ["url", "valueLocation", "targetValue"],
    url={"type": "string", "pattern": "^http"},
    format={"enum": ["json", "xml", "yaml", "prometheus"]},
    valueLocation={"type": "string"},
    targetValue={"type": "string", "pattern": r"^\d+$"},
    activationTargetValue={"type": "string", "pattern": r"^\d+$"},
)


def _trigger(kind: str, metadata: dict[str, Any]) -> dict[str, Any]:
    return _closed(
        ["type", "metadata"],
        type={"const": kind},
        metadata=metadata,
        metricType={"enum": ["AverageValue", "Value"]},
        name={"type": "string"},
    )


SCALED_OBJECT = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata=_closed(["name"], name={"type": "string"}, namespace={"type": "string"}, labels=TEXTS),
    spec=_closed(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=_closed(
            ["name"],
            apiVersion={"type": "string"},
            kind={"enum": ["Deployment", "StatefulSet"]},
            name={"type": "string"},
        ),
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        pollingInterval=NUMBER,
        cooldownPeriod=NUMBER,
        fallback=_closed(
            ["failureThreshold", "replicas"], failureThreshold=NUMBER, replicas=NUMBER
        ),
        advanced=_closed(
            [],
            horizontalPodAutoscalerConfig=_closed(
                [], behavior=_closed([], scaleDown={"type": "object"}, scaleUp={"type": "object"})
            ),
            scalingModifiers=_closed(
                ["formula", "target"],
                formula={"type": "string"},
                target={"type": "string", "pattern": r"^\d+$"},
                activationTarget={"type": "string", "pattern": r"^\d+$"},
                metricType={"enum": ["AverageValue", "Value"]},
            ),
        ),
        triggers={
            "type": "array",
            "minItems": 1,
            "items": {
                "oneOf": [
                    _trigger("nats-jetstream", JETSTREAM),
                    _trigger("metrics-api", METRICS_API),
                ]
            },
        },
    ),
)

SCRIPT = """
import {validate} from "%s";
import {readFileSync} from "node:fs";
const found = JSON.parse(readFileSync(0)).map(one => validate(one) ? [] : validate.errors);
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def published() -> Callable[[list[dict[str, Any]]], list[list[dict[str, Any]]]] | None:
    """The published validator; None where it cannot be fetched."""
    schemas = CACHE / "node_modules" / "@kubernetes-models" / "keda" / "_schemas" / VALIDATOR
    if not shutil.which("npm") or not shutil.which("node"):
        return None
    if not schemas.exists():
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(CACHE)]
        try:
            subprocess.run([*command, PACKAGE], timeout=INSTALL_SECONDS, capture_output=True)
        except subprocess.TimeoutExpired:
            return None
    if not schemas.exists():
        return None
    status = schemas.with_name(schemas.name.replace("Object.js", "ObjectStatus.js"))
    assert "triggersActivity" in status.read_text(), "KEDA 2.19 added it"

    def run(resources: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        script = CACHE / "check.mjs"
        script.write_text(SCRIPT % schemas)
        done = subprocess.run(
            ["node", str(script)], input=json.dumps(resources), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        answer: list[list[dict[str, Any]]] = json.loads(done.stdout)
        return answer

    return run


@pytest.fixture
def scaled() -> list[dict[str, Any]]:
    """Every ScaledObject, for both scalers."""
    resources = rendered() + rendered(scaler="nats-jetstream")
    found = [resource for resource in resources if resource["kind"] == "ScaledObject"]
    assert len(found) == 6
    return found


def test_scaled_objects_pass_a_strict_schema(scaled: list[dict[str, Any]]) -> None:
    """No field that KEDA's documentation does not know, and none missing."""
    for resource in scaled:
        jsonschema.validate(resource, SCALED_OBJECT)


@pytest.mark.parametrize("key", ["cooldownPeriods", "fallbacks"])
def test_strict_schema_refuses_a_wrong_field(key: str) -> None:
    """The schema above would see a typing error."""
    resource = one(rendered(), "ScaledObject", "resize")
    resource["spec"][key] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource, SCALED_OBJECT)


def test_scaled_objects_pass_the_published_schema(
    scaled: list[dict[str, Any]], published: Any, report: Callable[[str], None]
) -> None:
    """Types and required fields are those of KEDA's own definitions."""
    if published is None:
        report(f"{PACKAGE} could not be fetched: only the schema written from KEDA's docs was used")
        for resource in scaled:
            jsonschema.validate(resource, SCALED_OBJECT)
        return
    assert published(scaled) == [[] for _ in scaled]
    broken = json.loads(json.dumps(scaled[0]))
    broken["spec"]["pollingInterval"] = "often"
    del broken["spec"]["triggers"][0]["type"]
    [errors] = published([broken])
    assert errors
    report(f"{len(scaled)} ScaledObjects valid by {PACKAGE}")
