"""Makes kubernetes.json out of the PyPI package kubernetes-validate 1.37.0: the schemas that deploy/kubernetes needs.

pip install kubernetes-validate==1.37.0
python tools/golden/kubernetes.py
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

VERSION = "1.34"
GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "kubernetes"
KINDS = (
    "apps.v1.Deployment",
    "apps.v1.StatefulSet",
    "core.v1.ConfigMap",
    "core.v1.PersistentVolumeClaim",
    "core.v1.PodTemplateSpec",
    "core.v1.Service",
    "networking.v1.NetworkPolicy",
)
SPARE = ("description", "default", "format")


def lean(schema: Any) -> Any:
    """Without what says nothing to a validator; of properties that are called so, nothing is taken."""
    if isinstance(schema, list):
        return [lean(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: lean(part) for name, part in value.items()} if key == "properties" else lean(value)
        for key, value in schema.items()
        if key not in SPARE and not key.startswith("x-kubernetes")
    }


def needed(schema: Any) -> set[str]:
    """Names of the definitions that a schema speaks of."""
    if isinstance(schema, list):
        return set().union(*map(needed, schema))
    if not isinstance(schema, dict):
        return set()
    named = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return named.union(*map(needed, schema.values()))


def main() -> None:
    """Write it beside this file."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"
    there = json.loads((folder / "_definitions.json").read_text())["$defs"]
    found: dict[str, Any] = {}
    missing = {f"io.k8s.api.{kind}" for kind in KINDS}
    while missing:
        found |= {name: lean(there[name]) for name in missing}
        missing = needed(list(found.values())) - set(found)
    text = json.dumps({"$id": "kubernetes", "$defs": dict(sorted(found.items()))}, separators=(",", ":"))
    text = text.replace("/api/_definitions.json#", "#").replace(',"io.k8s.', ',\n"io.k8s.')
    (GOLDEN / "kubernetes.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
