"""Files of deploy/ for Docker and Kubernetes: valid, secure, and consistent with the server."""

import importlib.util
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from service.api.blueprint import ROUTES
from service.settings import FIELDS, PREFIX, load_settings, unknown_variables

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "kubernetes"
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
USER = 10001
# Ray reads these variables in each process. If a variable is missing, a node is open or cannot join.
SECURITY_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": "/etc/ray/token/token",
    "RAY_USE_TLS": "1",
    "RAY_TLS_SERVER_CERT": "/etc/ray/tls/tls.crt",
    "RAY_TLS_SERVER_KEY": "/etc/ray/tls/tls.key",
    "RAY_TLS_CA_CERT": "/etc/ray/tls/ca.crt",
}
PATHS = {route.path for route in ROUTES if route.method == "GET"}


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, as kubectl does."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"duplicate key: {node.start_mark}"
    return loader.construct_mapping(node, deep=True)


UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)

RESOURCES = [
    (f"{path.stem}/{resource['kind']}/{resource['metadata']['name']}", resource)
    for path in MANIFESTS
    for resource in yaml.load_all(path.read_text(), UniqueKeyLoader)
]


def pods_of(resource: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    spec = resource.get("spec", {})
    if resource["kind"] in ("Deployment", "StatefulSet"):
        yield resource["metadata"]["name"], spec["template"]
    elif resource["kind"] == "RayCluster":
        yield "head", spec["headGroupSpec"]["template"]
        for group in spec["workerGroupSpecs"]:
            yield group["groupName"], group["template"]


PODS = [(f"{name}/{part}", resource, pod) for name, resource in RESOURCES for part, pod in pods_of(resource)]
CONTAINERS = [
    (f"{name}/{container['name']}", pod, container)
    for name, _, pod in PODS
    for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
]
RAY = [
    (name, container)
    for name, pod, container in CONTAINERS
    if pod["metadata"]["labels"].get("robojax/ray") and container["name"] != "certificate"
]


def named(found: list[Any]) -> list[Any]:
    return [pytest.param(*rest, id=name) for name, *rest in found]


def environment(container: Mapping[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container.get("env", ())}


def words_of(container: Mapping[str, Any]) -> list[str]:
    """Return the words of the command line, or of the shell script that the container runs."""
    words = [*container.get("command", ()), *container.get("args", ())]
    if words[:1] != ["/bin/bash"]:
        return words
    return shlex.split(words[-1].replace("\\\n", ""), comments=True)


def serve_flags(container: Mapping[str, Any]) -> dict[str, str | None] | None:
    """Return the flags of ``robojax serve``, or None if the container runs another command."""
    words = words_of(container)
    if "serve" not in words:
        return None
    flags = [word.partition("=") for word in words[words.index("serve") + 1 :]]
    return {name: value if separator else None for name, separator, value in flags}


def validator(kind: str) -> Draft202012Validator:
    schemas = {name: json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("kubernetes", "raycluster")}
    registry: Registry = Registry().with_resources(
        (name, Resource.from_contents(schema | {"$schema": Draft202012Validator.META_SCHEMA["$id"]}))
        for name, schema in schemas.items()
    )
    if kind == "RayCluster":
        return Draft202012Validator({"$ref": "raycluster"}, registry=registry)
    definitions = {
        name.rpartition(".")[2]: name for name in schemas["kubernetes"]["$defs"] if name.startswith("io.k8s.api.")
    }
    return Draft202012Validator({"$ref": f"kubernetes#/$defs/{definitions[kind]}"}, registry=registry)


def schema_errors(resource: Mapping[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator(resource["kind"]).iter_errors(resource)]


@pytest.mark.parametrize("resource", named(RESOURCES))
def test_a_manifest_matches_its_schema_and_is_not_a_secret(resource: Mapping[str, Any]) -> None:
    assert schema_errors(resource) == []
    assert resource["kind"] != "Secret"


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("Deployment", lambda spec: spec["template"]["spec"]["containers"][0].update(image_pull_policy="Always")),
        ("RayCluster", lambda spec: spec["workerGroupSpecs"][0].pop("groupName")),
    ],
)
def test_the_schemas_refuse_an_invalid_manifest(kind: str, damage: Any) -> None:
    resource = json.loads(json.dumps(next(resource for _, resource in RESOURCES if resource["kind"] == kind)))
    damage(resource["spec"])
    assert schema_errors(resource)


@pytest.mark.parametrize(("resource", "pod"), named(PODS))
def test_a_pod_runs_without_privileges(resource: Mapping[str, Any], pod: Mapping[str, Any]) -> None:
    spec = pod["spec"]
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (USER, USER, USER)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostPID", "hostIPC", "hostNetwork"} & set(spec)
    assert not [volume["name"] for volume in spec["volumes"] if "hostPath" in volume]


@pytest.mark.parametrize(("pod", "container"), named(CONTAINERS))
def test_a_container_writes_only_to_its_volumes(pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in context
    assert container["resources"]["limits"]["memory"]
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}


@pytest.mark.parametrize(("resource", "pod"), named(PODS))
def test_every_mounted_volume_exists_and_every_volume_is_mounted(
    resource: Mapping[str, Any], pod: Mapping[str, Any]
) -> None:
    spec = pod["spec"]
    claims = {claim["metadata"]["name"] for claim in resource["spec"].get("volumeClaimTemplates", ())}
    volumes = {volume["name"] for volume in spec["volumes"]} | claims
    mounted = {
        mount["name"]
        for container in (*spec.get("initContainers", ()), *spec["containers"])
        for mount in container["volumeMounts"]
    }
    assert mounted == volumes
    secret = {volume["name"] for volume in spec["volumes"] if "secret" in volume}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"] if mount.get("readOnly")} >= secret & {
            mount["name"] for mount in container["volumeMounts"]
        }
        if container in spec["containers"]:
            assert "ca" not in {mount["name"] for mount in container["volumeMounts"]}, (
                "the key of the authority is mounted"
            )
    # Other users may not change a key or read a token. The group is the group of the pod.
    assert {volume["secret"]["defaultMode"] for volume in spec["volumes"] if "secret" in volume} == {0o440}


def test_selectors_match_pods_and_network_policies_cover_all_pods() -> None:
    def chosen(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
        return selector.items() <= labels.items()

    for path in MANIFESTS:
        resources = [resource for name, resource in RESOURCES if name.startswith(f"{path.stem}/")]
        labels = [pod["metadata"]["labels"] for resource in resources for _, pod in pods_of(resource)]
        policies = [item["spec"]["podSelector"]["matchLabels"] for item in resources if item["kind"] == "NetworkPolicy"]
        services = [resource["spec"]["selector"] for resource in resources if resource["kind"] == "Service"]
        assert all(any(chosen(policy, pod) for policy in policies) for pod in labels)
        assert all(any(chosen(selector, pod) for pod in labels) for selector in (*policies, *services))
        for resource in resources:
            if resource["kind"] in ("Deployment", "StatefulSet"):
                spec = resource["spec"]
                assert chosen(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"])


SERVERS = [(name, pod, container) for name, pod, container in CONTAINERS if serve_flags(container) is not None]


@pytest.mark.parametrize(("pod", "container"), named(SERVERS))
def test_probes_use_routes_of_the_server(pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == int(environment(container)[f"{PREFIX}PORT"])
    probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}
    assert set(probes) == {"startupProbe", "livenessProbe", "readinessProbe"}
    for name, probe in probes.items():
        if "httpGet" in probe:
            assert probe["httpGet"]["port"] in ports
            paths = [probe["httpGet"]["path"]]
        else:
            script = probe["exec"]["command"][-1]
            compile(script, name, "exec")
            paths = re.findall(r'"GET", "([^"]+)"', script)
        # Supervisors use /health and load balancers use /ready.
        assert paths == ["/ready" if name == "readinessProbe" else "/health"]
        assert set(paths) <= PATHS


@pytest.mark.parametrize(("pod", "container"), named(SERVERS))
def test_every_flag_is_a_setting(pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    flags = serve_flags(container)
    assert flags
    names = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}
    assert set(names) - set(FIELDS) == set()
    # Replace shell variables that only the pod knows.
    values = {name: re.sub(r"\$\{[A-Z_]+\}", "x", value or "") for name, value in names.items()}
    if any(variable["name"] == "ROBOJAX_DATABASE" for variable in container["env"]):
        values["database"] = "postgresql://user@host/name"  # The real value is in a Secret.
    settings = load_settings(values)
    assert settings.server.host == "0.0.0.0"
    assert not settings.access.insecure
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert settings.webhooks.state in mounts
    assert settings.access.keys_file is not None
    assert str(Path(settings.access.keys_file).parent) in mounts


@pytest.mark.parametrize(("pod", "container"), named(CONTAINERS))
def test_every_robojax_variable_is_a_setting(
    pod: Mapping[str, Any], container: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(container).items():
        monkeypatch.setenv(name, value or "")
    assert unknown_variables() == []


CLUSTER = next(resource for _, resource in RESOURCES if resource["kind"] == "RayCluster")
SERVER = next(container for name, _, container in SERVERS if name.startswith("ray/"))
FLAGS = serve_flags(SERVER) or {}


@pytest.mark.parametrize("container", named(RAY))
def test_every_ray_node_is_secured(container: Mapping[str, Any]) -> None:
    values = environment(container)
    assert {name: values.get(name) for name in SECURITY_VARIABLES} == SECURITY_VARIABLES
    assert "POD_IP" in values
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/etc/ray/token", "/etc/ray/tls", "/tmp"} <= mounts


def test_all_nodes_have_one_image_and_the_version_of_the_extra() -> None:
    images = {container["image"] for name, _, container in CONTAINERS if name.startswith("ray/")}
    assert len(images) == 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert images.pop().endswith(f":{project['version']}")
    from packaging.requirements import Requirement

    extra = Requirement(project["optional-dependencies"]["ray"][0])
    assert extra.name == "ray"
    assert CLUSTER["spec"]["rayVersion"] in extra.specifier


def test_servers_find_the_head_and_its_certificate_has_that_name() -> None:
    # KubeRay derives this name.
    head = f"{CLUSTER['metadata']['name']}-head-svc"
    parameters = CLUSTER["spec"]["headGroupSpec"]["rayStartParams"]
    addresses = {
        word.removeprefix("--address=") for word in words_of(SERVER) if word.rpartition("=")[2].startswith(head)
    }
    assert {word.rstrip(";") for word in addresses} == {f"{head}:{parameters['port']}"}
    certificate = CLUSTER["spec"]["headGroupSpec"]["template"]["spec"]["initContainers"][0]
    assert environment(certificate)["NAMES"].split()[0] == head


def test_engines_fit_into_their_group() -> None:
    [group] = CLUSTER["spec"]["workerGroupSpecs"]
    assert group["replicas"] == int(FLAGS["--engines-most"] or 0)
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    requested = dict(part.split("=") for part in (FLAGS["--engine-resources"] or "").split(","))
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert float(requested["CPU"]) <= float(group["rayStartParams"]["num-cpus"])
    assert float(requested["GPU"]) <= float(limits["nvidia.com/gpu"])


def test_a_server_is_reachable_at_its_configured_address() -> None:
    server = next(resource for _, resource in RESOURCES if resource["kind"] == "StatefulSet")
    service = next(item for _, item in RESOURCES if item["metadata"]["name"] == server["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    port = service["spec"]["ports"][0]["port"]
    assert FLAGS["--front-url"] == f"http://${{POD_NAME}}.{service['metadata']['name']}.${{NAMESPACE}}.svc:{port}"
    assert FLAGS["--front-name"] == "${POD_NAME}"


@pytest.mark.skipif(importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed")
def test_a_pod_signs_a_certificate_for_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    now = datetime.now(UTC)
    authority = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (tmp_path / "ca.crt").write_bytes(authority.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "ca.key").write_bytes(private)
    made = tmp_path / "tls"
    made.mkdir()
    for variable, value in {"CA_FOLDER": tmp_path, "TLS_FOLDER": made, "POD_IP": "10.1.2.3", "NAMES": "a b.c"}.items():
        monkeypatch.setenv(variable, str(value))
    script = next(item for _, item in RESOURCES if item["kind"] == "ConfigMap")["data"]["certificate.py"]
    (tmp_path / "certificate.py").write_text(script)
    runpy.run_path(str(tmp_path / "certificate.py"))

    certificate = x509.load_pem_x509_certificate((made / "tls.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "a", "b.c"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("127.0.0.1"), ip_address("10.1.2.3")]
    assert (made / "ca.crt").read_bytes() == (tmp_path / "ca.crt").read_bytes()
    assert (made / "tls.key").stat().st_mode & 0o077 == 0
    assert not (made / "ca.key").exists()


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile without comments and with joined lines."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    return found[max(index for index, (word, _) in enumerate(found) if word == "FROM") :]


def variables() -> dict[str, str]:
    values = [rest for word, rest in last_stage() if word == "ENV"]
    return dict(pair.split("=", 1) for rest in values for pair in shlex.split(rest))


def test_the_image_pins_its_base() -> None:
    [tag] = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("PYTHON=")]
    assert re.fullmatch(r"PYTHON=3\.11\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", tag)
    assert {rest.split(" ")[0] for word, rest in instructions() if word == "FROM"} == {"python:${PYTHON}"}


def test_the_image_runs_as_the_user_of_the_manifests() -> None:
    stage = dict(last_stage())
    assert ("ARG", f"USER_ID={USER}") in last_stage()
    assert stage["USER"] == "${USER_ID}"
    words = [word for word, _ in last_stage()]
    assert "RUN" not in words[words.index("USER") :]
    assert stage["STOPSIGNAL"] == "SIGTERM"


def test_the_image_installs_no_compiler_or_downloader() -> None:
    assert not re.search(r"apt-get|curl|wget|gcc|build-essential", "\n".join(rest for _, rest in instructions()))


def test_every_writable_folder_is_in_a_volume() -> None:
    volumes = json.loads(dict(last_stage())["VOLUME"])
    values = variables()
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "ROBOJAX_STATE"):
        assert any(Path(values[name]).is_relative_to(volume) for volume in volumes), name
    assert values["TMPDIR"] == "/tmp"
    # The manifests mount the same folders.
    mounts = {mount["mountPath"] for _, _, container in SERVERS for mount in container["volumeMounts"]}
    assert {*volumes, "/tmp"} <= mounts


def test_every_variable_of_the_image_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables().items():
        if name.startswith(PREFIX):
            monkeypatch.setenv(name, value)
    assert unknown_variables() == []
    load_settings()


def test_the_image_serves_and_has_a_health_check() -> None:
    stage = dict(last_stage())
    assert json.loads(stage["ENTRYPOINT"]) == ["robojax"]
    command = json.loads(stage["CMD"])
    assert command[0] == "serve"
    flags = dict(zip(command[1::2], command[2::2], strict=True))
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= set(FIELDS)
    check = json.loads(stage["HEALTHCHECK"].partition(" CMD ")[2])
    assert check[:2] == ["python", "-c"]
    compile(check[2], "HEALTHCHECK", "exec")
    assert re.findall(r"'GET', '([^']+)'", check[2]) == ["/health"]
    assert variables()[f"{PREFIX}PORT"] == dict(last_stage())["EXPOSE"]


def test_the_build_context_has_only_the_sources_of_the_wheel() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    expected = {*packages, "pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == expected
