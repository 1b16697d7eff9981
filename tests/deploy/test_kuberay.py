"""The manifests for KubeRay: what kustomize makes of them fits the schemas, and keeps our rules."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import ray

from tests.deploy.kuberay_models import RayCluster, RayJob
from tests.deploy.manifests import (
    DEPLOY,
    built,
    check_command,
    check_setting,
    documents,
    pod_templates,
    size,
    words,
)

OVERLAYS = ("small", "production")
VERSION = "1.31.0"
"""Of Kubernetes: the oldest whose schemas they are held to."""
FOREIGN = {"Issuer", "Certificate", "PodMonitor"}
"""Kinds of other operators, whose schemas are not at hand."""
FREE_BYTES = 64 << 20
"""What a value store leaves free of its mount (dataplane/values/budget.py)."""
HEAP_BYTES = 2 << 30
"""What the processes of a node need at least, beside what lies in shared memory."""
STORE_BYTES = 512 << 20
"""What a node's value store should have at least."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifests, with secrets as an operator makes them."""
    folder = tmp_path_factory.mktemp("kuberay") / "kuberay"
    shutil.copytree(DEPLOY / "kuberay", folder)
    secrets = folder / "overlays" / "small" / "secrets"
    secrets.mkdir(exist_ok=True)
    for name in ("tls.crt", "tls.key", "tokens.json"):
        (secrets / name).write_text("{}")
    return folder


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    return built(folder / "overlays" / request.param)


def _containers(objects: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    for name, template in pod_templates(objects):
        spec = template["spec"]
        for container in chain(spec["containers"], spec.get("initContainers", ())):
            yield f"{name}/{container['name']}", spec, container


def _of_kind(objects: list[dict[str, Any]], kind: str) -> list[Any]:
    return [each for each in objects if each["kind"] == kind]


def test_no_file_says_a_key_twice() -> None:
    for path in DEPLOY.rglob("*.yaml"):
        documents(path.read_text())


def test_objects_fit_the_schemas(objects: list[dict[str, Any]]) -> None:
    for each in objects:
        if each["kind"] == "RayCluster":
            RayCluster.model_validate(each)
        elif each["kind"] == "RayJob":
            RayJob.model_validate(each)
        elif each["kind"] not in FOREIGN:
            kubernetes_validate.validate(each, VERSION, strict=True)


def test_pod_templates_fit_the_schema(objects: list[dict[str, Any]]) -> None:
    for name, template in pod_templates(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": name, **template.get("metadata", {})}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_a_wrong_field_is_refused(objects: list[dict[str, Any]]) -> None:
    [cluster] = _of_kind(objects, "RayCluster")
    with pytest.raises(ValueError, match="extra"):
        RayCluster.model_validate({**cluster, "spec": {**cluster["spec"], "workerGroups": []}})
    [service] = _of_kind(objects, "Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "specs": {}}, VERSION, strict=True)


def test_everything_is_in_one_namespace(objects: list[dict[str, Any]]) -> None:
    [namespace] = _of_kind(objects, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for each in objects:
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] == namespace["metadata"]["name"], each["kind"]


def test_containers_are_hardened(objects: list[dict[str, Any]]) -> None:
    for name, pod, container in _containers(objects):
        whole, own = pod["securityContext"], container["securityContext"]
        assert whole["runAsNonRoot"] is True, name
        assert whole["runAsUser"] == 10001, name
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert own["allowPrivilegeEscalation"] is False, name
        assert own["readOnlyRootFilesystem"] is True, name
        assert own["capabilities"] == {"drop": ["ALL"]}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert not pod.get("hostNetwork"), name
        image, _, tag = container["image"].partition(":")
        assert image
        assert tag not in ("", "latest"), name


def test_containers_have_limits_and_probes(objects: list[dict[str, Any]]) -> None:
    for name, _, container in _containers(objects):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), name
        assert {"cpu", "memory", "ephemeral-storage"} <= resources["limits"].keys(), name
        if container["name"] != "ray-job-submitter":
            named = {port["name"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert container[probe]["httpGet"]["port"] in named, name


def test_what_is_written_is_mounted(objects: list[dict[str, Any]]) -> None:
    for name, pod, container in _containers(objects):
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert set(mounts.values()) <= volumes, name
        needed = {"/tmp"}
        if container["name"] != "ray-job-submitter":
            needed |= {"/dev/shm", "/run/dataplane", "/var/lib/dataplane"}
        assert needed <= mounts.keys(), name


def test_shared_memory_fits(objects: list[dict[str, Any]]) -> None:
    [cluster] = _of_kind(objects, "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"].get("workerGroupSpecs", [])]
    for group in groups:
        pod = group["template"]["spec"]
        [shared] = [v["emptyDir"] for v in pod["volumes"] if v["name"] == "shared-mem"]
        assert shared["medium"] == "Memory"
        room, limit = size(shared["sizeLimit"]), pod["containers"][0]["resources"]["limits"]
        ray_bytes = int(group["rayStartParams"]["object-store-memory"])
        assert ray_bytes + FREE_BYTES + STORE_BYTES <= room
        assert room + HEAP_BYTES <= size(limit["memory"])
        disks = [size(v["emptyDir"]["sizeLimit"]) for v in pod["volumes"] if v.get("emptyDir")]
        assert max(disks) <= max(size(limit["ephemeral-storage"]), room)


def test_no_secret_is_written_down(objects: list[dict[str, Any]]) -> None:
    for name, _, container in _containers(objects):
        for variable in container.get("env", []):
            if variable["name"].startswith("DATAPLANE_"):
                check_setting(variable["name"])
            wrong = any(word in variable["name"] for word in ("TOKEN", "SECRET", "PASSWORD", "KEY"))
            assert not (wrong and "value" in variable), name


def test_secrets_keep_their_names(objects: list[dict[str, Any]]) -> None:
    """A changed name would replace the head's pod, and with it the plane."""
    wanted = {"rl-dataplane-gateway-tls", "rl-dataplane-gateway-tokens"}
    [cluster] = _of_kind(objects, "RayCluster")
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    secrets = [v["secret"] for v in pod["volumes"] if "secret" in v]
    assert {secret["secretName"] for secret in secrets} == wanted
    for secret in secrets:
        assert not secret["defaultMode"] & 0o027, "others may neither read nor write"
    made = {each["metadata"]["name"] for each in _of_kind(objects, "Secret")}
    made |= {each["spec"]["secretName"] for each in _of_kind(objects, "Certificate")}
    assert made <= wanted


def test_the_job_runs_what_the_trainer_takes(objects: list[dict[str, Any]]) -> None:
    [job], [cluster] = _of_kind(objects, "RayJob"), _of_kind(objects, "RayCluster")
    assert job["spec"]["clusterSelector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    command = words(job["spec"]["entrypoint"])
    check_command(command)
    mounts = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    paths = tuple(f"{mount['mountPath']}/" for mount in mounts)
    for word in command:
        _, _, value = word.partition("=")
        if value.startswith("/"):
            assert value.startswith(paths), f"{word}: not mounted"


def test_ports_agree(objects: list[dict[str, Any]]) -> None:
    [cluster], [service] = _of_kind(objects, "RayCluster"), _of_kind(objects, "Service")
    head = cluster["spec"]["headGroupSpec"]["template"]
    ports = {p["name"]: p["containerPort"] for p in head["spec"]["containers"][0]["ports"]}
    for port in service["spec"]["ports"]:
        assert port["targetPort"] in ports
    [job] = _of_kind(objects, "RayJob")
    command = job["spec"]["entrypoint"]
    assert f"gateway.listen=0.0.0.0:{ports['gateway']}" in command
    assert f"settings.metrics_port={ports['plane-metrics']}" in command
    assert ports["store-metrics"] == ports["plane-metrics"] + 1
    assert f"gateway.metrics_port={ports['gate-metrics']}" in command
    for name, template in pod_templates(objects):
        if name == "submitter":
            continue
        known = {p["containerPort"] for p in template["spec"]["containers"][0]["ports"]}
        noted = template["metadata"]["annotations"]
        assert noted["prometheus.io/scrape"] == "true"
        assert int(noted["prometheus.io/port"]) in known
    for monitor in _of_kind(objects, "PodMonitor"):
        assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= ports.keys()


def test_the_network_is_closed_but_for_named_ports(objects: list[dict[str, Any]]) -> None:
    policies = _of_kind(objects, "NetworkPolicy")
    closed = [p for p in policies if not p["spec"].get("ingress") and not p["spec"].get("egress")]
    assert len(closed) == 2
    assert all(p["spec"]["policyTypes"] == ["Ingress", "Egress"] for p in closed)
    [cluster] = _of_kind(objects, "RayCluster")
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    named = {port["name"] for port in head["ports"]}
    for policy in policies:
        spec = policy["spec"]
        among_nodes = spec["podSelector"].get("matchLabels", {}).get("ray.io/is-ray-node") == "yes"
        for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
            assert rule.get("from") or rule.get("to"), policy["metadata"]["name"]
            assert among_nodes or rule["ports"], policy["metadata"]["name"]
            for port in rule.get("ports", ()):
                assert port["port"] in named | {53}, policy["metadata"]["name"]


def test_budgets_count_pods(objects: list[dict[str, Any]]) -> None:
    """Pods of a RayCluster have no scale, of which a part or a rest could be counted."""
    [cluster] = _of_kind(objects, "RayCluster")
    workers = sum(group["minReplicas"] for group in cluster["spec"].get("workerGroupSpecs", []))
    budgets = {b["metadata"]["name"]: b["spec"] for b in _of_kind(objects, "PodDisruptionBudget")}
    assert budgets["rl-dataplane-head"]["minAvailable"] == 1
    assert ("rl-dataplane-workers" in budgets) == (workers > 0)
    if workers:
        assert 0 < budgets["rl-dataplane-workers"]["minAvailable"] < workers


def test_the_version_of_ray_is_that_of_the_image(objects: list[dict[str, Any]]) -> None:
    [cluster] = _of_kind(objects, "RayCluster")
    pinned = (DEPLOY.parent / "constraints.txt").read_text()
    assert f"ray=={cluster['spec']['rayVersion']}\n" in pinned
    assert ray.__version__


def test_an_image_is_set_in_one_place(folder: Path) -> None:
    path = folder / "overlays" / "production" / "kustomization.yaml"
    before = path.read_text()
    path.write_text(before.replace("newTag: 0.1.0", "newTag: 9.9.9"))
    try:
        images = [c["image"] for _, _, c in _containers(built(path.parent))]
    finally:
        path.write_text(before)
    assert set(images) == {"rl-dataplane:9.9.9"}
    assert len(images) == 3
