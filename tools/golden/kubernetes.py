"""Write kubernetes.json with the schemas of deploy/kubernetes from the PyPI package kubernetes-validate 1.37.0.

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
IGNORED = ("description", "default", "format")


def lean(schema: Any) -> Any:
    """Remove keywords that a validator ignores, but keep properties with the same names."""
    if isinstance(schema, list):
        return [lean(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: lean(part) for name, part in value.items()} if key == "properties" else lean(value)
        for key, value in schema.items()
        if key not in IGNORED and not key.startswith("x-kubernetes")
    }


def needed(schema: Any) -> set[str]:
    """Return the names of the definitions to which a schema refers."""
    if isinstance(schema, list):
        return set().union(*map(needed, schema))
    if not isinstance(schema, dict):
        return set()
    named = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
    return named.union(*map(needed, schema.values()))


def main() -> None:
    """Write the file to the folder of golden data."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    found: dict[str, Any] = {}
    missing = {f"io.k8s.api.{kind}" for kind in KINDS}
    while missing:
        found |= {name: lean(definitions[name]) for name in missing}
        missing = needed(list(found.values())) - set(found)
    text = json.dumps({"$id": "kubernetes", "$defs": dict(sorted(found.items()))}, separators=(",", ":"))
    text = text.replace("/api/_definitions.json#", "#").replace(',"io.k8s.', ',\n"io.k8s.')
    (GOLDEN / "kubernetes.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
