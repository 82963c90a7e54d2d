"""What we would tell a cluster: every manifest, as Kustomize makes it, held to schemas and to what must not go wrong.

There is no cluster here. What these tests cannot show, docs/kubernetes.md says.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from deploy import images
from deploy.kubernetes import validate
from deploy.kubernetes.validate import (
    NEWEST,
    OLDEST,
    SCHEMAS,
    Manifest,
    ManifestError,
    main,
    own_schema,
    problems_of,
    render,
)
from serve import model_config, remote, repository
from serve.__main__ import CURRENT
from serve.release import open_release
from serve.server import DRAIN_SECONDS
from slipway import compatibility
from slipway.contract import Preprocessing
from slipway.errors import UsageError
from tests.s3 import ACCESS, make_bucket, s3_server
from tests.serve.tools import make_bundle
from tests.slipway.test_signing import make_keys

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
COPYING = ("overlays/cpu", "overlays/gpu", "overlays/canary", "overlays/keda", "overlays/oci-release")
SERVING = (*COPYING, "overlays/s3-release")
# Release.largest_batch_bytes of a release with the defaults of training.
RULES = Preprocessing(image_size=224, resize_size=256)
LARGEST_BATCH_BYTES = 32 * (RULES.max_bytes + 2 * 3 * RULES.image_size**2)
OURS = (*SERVING, "overlays/gateway", "overlays/kserve", "training/jobset", "training/trainjob")


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    return tuple(render(FOLDER / name))


def of_kind(name: str, *kinds: str) -> list[Manifest]:
    return [manifest for manifest in rendered(name) if manifest["kind"] in kinds]


def pods(name: str) -> Iterator[dict[str, Any]]:
    """Every pod that a kustomization leads to; KServe's is put together of two parts."""
    for manifest in rendered(name):
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Deployment":
                yield spec["template"]["spec"]
            case "JobSet":
                yield from (job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"])
            case "TrainingRuntime":
                jobs = spec["template"]["spec"]["replicatedJobs"]
                yield from (job["template"]["spec"]["template"]["spec"] for job in jobs)
            case "InferenceService":
                (runtime,) = of_kind(name, "ServingRuntime")
                yield {**spec["predictor"], **runtime["spec"]}


def containers(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for pod in pods(name):
        yield from ((pod, each) for each in (*pod.get("initContainers", ()), *pod["containers"]))


def server(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod that serves, and its container."""
    pod = next(pods(name))
    return pod, pod["containers"][0]


def mebibytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * (1024 if unit == "Gi" else 1)


@pytest.mark.parametrize("name", OURS)
def test_every_manifest_is_valid(name: str) -> None:
    assert [problem for manifest in rendered(name) for problem in problems_of(manifest)] == []


@pytest.mark.parametrize("name", OURS)
def test_everything_is_in_the_namespace_that_comes_with_it(name: str) -> None:
    """Else it would be made in whichever one kubectl is set to: an autoscaler there finds nothing to scale."""
    (namespace,) = of_kind(name, "Namespace")
    others = [manifest["metadata"] for manifest in rendered(name) if manifest["kind"] != "Namespace"]
    assert {each.get("namespace") for each in others} == {namespace["metadata"]["name"]}


def test_every_kustomization_is_tested() -> None:
    """Those that others are made of appear in them."""
    overlays = {str(path.parent.relative_to(FOLDER)) for path in FOLDER.glob("overlays/*/kustomization.yaml")}
    trainings = {"training/jobset", "training/trainjob"}
    assert set(OURS) == overlays | trainings


def test_unknown_field_is_found_wherever_it_is() -> None:
    """Case E01, for manifests: the cluster would drop it without a word."""
    one_of_each = {manifest["kind"]: manifest for name in OURS for manifest in rendered(name)}
    assert len(one_of_each) > 15
    for kind, manifest in one_of_each.items():
        paths = list(objects_in(manifest))
        # Kubernetes' own schemas are closed throughout; of ours each object is tried.
        for path in paths if own_schema(manifest) else [paths[0], paths[-1]]:
            broken: Any = copy.deepcopy(manifest)
            reduce(getitem, path, broken)["repilcas"] = 3
            assert any("repilcas" in problem for problem in problems_of(broken, (NEWEST,))), (kind, path)


def objects_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all objects whose fields are fixed. What people name themselves may have any."""
    if isinstance(value, dict):
        yield path
        named = {"labels", "annotations", "matchLabels", "requests", "limits", "data"}
        for key in [key for key in value if key not in named]:
            yield from objects_in(value[key], (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from objects_in(each, (*path, index))


def test_unknown_kind_is_found() -> None:
    """kubernetes-validate itself would only warn."""
    manifest = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledJob", "metadata": {"name": "x"}, "spec": {}}
    assert [problem.split(":")[0] for problem in problems_of(manifest)] == ["ScaledJob x"] * 2


def test_command_fails_for_a_folder_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main([str(FOLDER / "overlays" / "cpu")])
    (tmp_path / "kustomization.yaml").write_text("resources: [thing.yaml]\n")
    (tmp_path / "thing.yaml").write_text(
        "apiVersion: v1\nkind: Service\nmetadata: {name: thing}\nspec: {prots: []}\n"
    )
    with pytest.raises(ManifestError, match=r"Service thing, Kubernetes 1\.37: spec: Additional .*'prots'"):
        main([str(tmp_path)])
    with pytest.raises(ManifestError, match="no-such-folder"):
        main([str(tmp_path / "no-such-folder")])
    with pytest.raises(UsageError):
        main([])
    monkeypatch.setattr(validate, "KUBECTL", tmp_path / "kubectl")
    with pytest.raises(ManifestError, match="kubectl: was not found"):
        main([str(tmp_path)])


def test_schemas_of_ours_allow_no_unknown_field() -> None:
    def closed(schema: Any) -> bool:
        if isinstance(schema, dict):
            return ("properties" not in schema or schema.get("additionalProperties") is False) and all(
                map(closed, schema.values())
            )
        return all(map(closed, schema)) if isinstance(schema, list) else True

    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        assert closed(schema), path
        assert "$comment" in schema


@pytest.mark.parametrize("name", OURS)
def test_every_container_is_restricted(name: str) -> None:
    """What the namespace enforces (pod security `restricted`), and a read-only root besides."""
    (namespace,) = of_kind(name, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert list(containers(name))
    for pod, container in containers(name):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000  # the user of the images
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
        assert kinds <= {"emptyDir", "persistentVolumeClaim", "configMap", "image", "secret"}


@pytest.mark.parametrize("name", OURS)
def test_every_container_says_what_it_needs(name: str) -> None:
    for pod, container in containers(name):
        needs = container["resources"]
        assert {"cpu", "memory", "ephemeral-storage"} <= needs["requests"].keys()
        assert needs["limits"]["memory"] == needs["requests"]["memory"], "it would be the first to be killed"
        scratch = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
        assert all("sizeLimit" in each for each in scratch)
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]  # where the images write


@pytest.mark.parametrize("name", OURS)
def test_images_are_pinned_by_the_table_of_versions(name: str) -> None:
    pins = compatibility.load()
    expected = {
        "slipway-serve": pins.triton.container.release,
        "slipway-gateway": pins.docker.nginx_image.partition(":")[2],
        "slipway-train": pins.train["torch"],
        "slipway-release": "digits-1",
    }
    references = {container["image"] for _, container in containers(name)}
    references |= {
        volume["image"]["reference"] for pod in pods(name) for volume in pod["volumes"] if "image" in volume
    }
    for reference in references:
        image, _, tag = reference.partition(":")
        assert tag == expected[image]


@pytest.mark.parametrize("name", [*SERVING, "overlays/kserve"])
def test_probes_infer(name: str) -> None:
    """Case D03: Triton's own health stays good when a model's process is dead."""
    _, container = server(name)
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    for probe in probes.values():
        assert probe["exec"]["command"] == ["python3", "-m", "serve", "health"]
        assert probe["timeoutSeconds"] > 10, "what a golden image may wait in a queue"
    patience = {kind: probe["periodSeconds"] * probe["failureThreshold"] for kind, probe in probes.items()}
    assert patience["liveness"] >= 3 * patience["readiness"], "a busy server would be started again and again"
    assert patience["startup"] >= 300


@pytest.mark.parametrize("name", SERVING)
def test_arithmetic_of_the_end(name: str) -> None:
    """A pod answers until nobody asks it any more, then as long as a request may take, and is not killed before."""
    pod, container = server(name)
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause >= 10, "endpoints and gateways take seconds to learn"
    assert exit_timeout() >= model_config.QUEUE_TIMEOUT_SECONDS, (
        "a request that waits is answered or refused by then"
    )
    assert pod["terminationGracePeriodSeconds"] >= pause + exit_timeout() + 10, (
        "processes of models end after that"
    )


def exit_timeout() -> int:
    """Of the image's command: said there, or that of every server of ours."""
    said = re.search(r"--exit-timeout-secs=(\d+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    return int(said[1]) if said else DRAIN_SECONDS


@pytest.mark.parametrize("name", [*SERVING, "overlays/kserve"])
def test_shared_memory_is_what_the_largest_requests_need(name: str) -> None:
    """Case D06. Of a release with the defaults of training, published for as many CPUs as the container has."""
    pod, container = server(name)
    (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert shm["medium"] == "Memory"
    cpus = container["resources"]["limits"]["cpu"]
    assert cpus == container["resources"]["requests"]["cpu"]
    needed = min(int(cpus), model_config.MAX_INSTANCES) * LARGEST_BATCH_BYTES / 2**20
    assert mebibytes(shm["sizeLimit"]) >= needed
    # Whatever is in it counts as memory of the container; the server and its models need some, too.
    assert mebibytes(container["resources"]["limits"]["memory"]) >= needed + 2048


@pytest.mark.parametrize("name", COPYING)
def test_only_a_verified_release_is_served(name: str) -> None:
    pod, container = server(name)
    (delivery,) = pod["initContainers"]
    place = {"name": "release", "mountPath": "/app/model_repository/current"}
    assert place in delivery["volumeMounts"]
    assert {**place, "readOnly": True} in container["volumeMounts"]
    assert delivery["command"][-1].endswith(" && exec python3 -m serve verify model_repository/current")
    assert "command" not in container
    assert "args" not in container


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """What the image has in /app."""
    for source in ("src/slipway", "serve"):
        shutil.copytree(
            ROOT / source, tmp_path / "app" / source, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path / "app"


def deliver(script: str, app: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the command of an init container, which is run again if the pod's sandbox is lost."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"PATH": programs, "PYTHONPATH": f"{app}{os.pathsep}{app / 'src'}"}
    return subprocess.run(
        ["sh", "-c", script],
        cwd=app,
        env={**os.environ, **ours, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_delivery_takes_a_whole_release_also_twice_and_refuses_a_damaged_one(
    app: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(tmp_path / "bundles" / "tiny" / "1")
    release = repository.publish(bundle, tmp_path / "repository", "container", 2)
    (app / "model_repository" / "current").mkdir(parents=True)
    script = server("overlays/cpu")[0]["initContainers"][0]["command"][-1].replace("/source", str(release))
    for _ in range(2):
        done = deliver(script, app)
        assert (done.returncode, done.stdout[:7]) == (0, "tiny/1@"), done.stderr
    (release / "models" / "classifier" / "labels.txt").write_text("damaged")
    done = deliver(script, app)
    assert done.returncode == 1
    assert "labels.txt: differs from the manifest" in done.stderr


@pytest.mark.slow
@pytest.mark.integration
def test_delivery_from_storage_takes_a_signed_release_also_twice_and_no_other(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(tmp_path / "bundles" / "tiny" / "1")
    private, public = make_keys(tmp_path, "release")
    script = server("overlays/s3-release")[0]["initContainers"][0]["command"][-1]
    script = script.replace("/release-key/release.pub", str(public))
    with s3_server(tmp_path / "log") as endpoint:
        for name, value in {**ACCESS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        make_bucket(endpoint, "releases")
        for place, key in (("signed", private), ("unsigned", None)):
            release = repository.publish(bundle, tmp_path / place, "container", 2, sign_key=key)
            remote.push(release, f"s3://releases/{place}")
        done = deliver(script, app, RELEASES="s3://releases/unsigned", RELEASE="tiny-1")
        assert (done.returncode, done.stdout) == (1, "")
        assert "s3://releases/unsigned/tiny-1: is not signed" in done.stderr
        assert not (app / "model_repository" / "current").exists()
        for _ in range(2):
            done = deliver(script, app, RELEASES="s3://releases/signed", RELEASE="tiny-1")
            assert done.returncode == 0, done.stderr
    assert open_release(app / "model_repository" / "current").identity.startswith("tiny/1@")


def test_only_a_pulled_and_signed_release_is_served_from_storage() -> None:
    """What `pull` and `promote` do to a release is tested with them; they find their repository where it is mounted."""
    pod, container = server("overlays/s3-release")
    (delivery,) = pod["initContainers"]
    script = delivery["command"][-1]
    assert '--public-key /release-key/release.pub && exec python3 -m serve promote "$RELEASE"' in script
    assert script.startswith('python3 -m serve pull "$RELEASES/$RELEASE" ')
    assert {"RELEASE", "RELEASES"} == {variable["name"] for variable in delivery["env"]}
    assert delivery["envFrom"] == [{"secretRef": {"name": "release-storage"}}]
    assert "envFrom" not in container, "the server itself has no use for the storage's credentials"
    place = {"name": "release", "mountPath": "/app/model_repository"}
    assert place in delivery["volumeMounts"]
    assert {**place, "readOnly": True} in container["volumeMounts"]
    assert not of_kind("overlays/s3-release", "PersistentVolumeClaim")


def test_commands_in_manifests_say_where_and_put_no_secret_on_a_command_line() -> None:
    lines = [
        line for path in FOLDER.rglob("*.yaml") for line in path.read_text(encoding="utf-8").splitlines()
    ]
    creating = [line for line in lines if "kubectl" in line and "create" in line]
    assert len(creating) == 3
    for line in creating:
        assert "kubectl -n slipway create " in line
        assert "--from-literal" not in line


def test_kserve_serves_only_a_verified_release_with_the_flags_of_the_image() -> None:
    _, container = server("overlays/kserve")
    assert container["args"][:2] == ["sh", "-c"]
    (command,) = re.findall(
        r'(?m)^CMD \["(.*"serve".*)"\]$', (ROOT / "Dockerfile").read_text(encoding="utf-8")
    )
    command = command.replace('", "', " ")
    assert container["args"][2] == f"ln -sfn /mnt/models {CURRENT.relative_to(ROOT)} && exec {command}"


@pytest.mark.parametrize("name", SERVING)
def test_an_eviction_leaves_somebody_who_answers(name: str) -> None:
    (budget,) = of_kind(name, "PodDisruptionBudget")
    scalers = of_kind(name, "HorizontalPodAutoscaler", "ScaledObject")
    (stable,) = (each for each in of_kind(name, "Deployment") if each["metadata"]["name"] == "triton")
    assert len(scalers) == 1, "two autoscalers of one Deployment work against each other"
    assert "replicas" not in stable["spec"], "applying again would undo what the autoscaler decided"
    scaler = scalers[0]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "triton"
    fewest = scaler.get("minReplicas", scaler.get("minReplicaCount"))
    assert fewest - budget["spec"]["maxUnavailable"] >= 1
    assert (
        budget["spec"]["selector"]["matchLabels"].items()
        <= stable["spec"]["template"]["metadata"]["labels"].items()
    )
    assert stable["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_both_autoscalers_look_at_requests_that_wait() -> None:
    (autoscaler,) = of_kind("overlays/cpu", "HorizontalPodAutoscaler")
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "nv_inference_pending_request_count"
    (scaled,) = of_kind("overlays/keda", "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert "nv_inference_pending_request_count" in trigger["metadata"]["query"]
    assert trigger["metadata"]["threshold"] == metric["pods"]["target"]["averageValue"]


@pytest.mark.parametrize("name", OURS)
def test_everything_is_denied_that_is_not_allowed(name: str) -> None:
    policies = of_kind(name, "NetworkPolicy")
    denial = [each["spec"] for each in policies if each["metadata"]["name"] == "default-deny"]
    assert denial == [{"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}]
    for rule in (rule for each in policies for rule in each["spec"].get("ingress", [])):
        assert rule["from"], "a rule without `from` lets in everybody"


def test_triton_is_asked_by_the_gateway_and_measured_by_prometheus_and_calls_nobody() -> None:
    policies = {
        each["metadata"]["name"]: each["spec"] for each in of_kind("overlays/canary", "NetworkPolicy")
    }
    asked, measured = policies["triton"]["ingress"]
    assert asked["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "gateway"}}}]
    assert [port["port"] for port in asked["ports"]] == [8000, 8001]
    assert [port["port"] for port in measured["ports"]] == [8002]
    assert "egress" not in policies["triton"]
    to_triton, to_names = policies["gateway"]["egress"]
    assert (to_triton["to"], to_triton["ports"]) == (
        [{"podSelector": policies["triton"]["podSelector"]}],
        asked["ports"],
    )
    assert {port["port"] for port in to_names["ports"]} == {53}
    selector = policies["triton"]["podSelector"]["matchLabels"].items()
    for deployment in of_kind("overlays/canary", "Deployment"):
        if deployment["metadata"]["name"].startswith("triton"):
            assert selector <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_gateway_is_given_the_secrets_that_its_image_looks_for_and_ends_when_nobody_asks_it() -> None:
    (deployment,) = (
        each["spec"]
        for each in of_kind("overlays/gateway", "Deployment")
        if each["metadata"]["name"] == "gateway"
    )
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    image = images.stages_of("gateway")
    looked_for = set(re.findall(r"=/run/secrets/(\w+)", image))
    named = set(
        re.findall(r"--from-file=(\w+)=", (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8"))
    )
    assert looked_for == named
    assert {"name": "secrets", "mountPath": "/run/secrets", "readOnly": True} in container["volumeMounts"]
    assert {variable["name"] for variable in container["env"]} <= set(re.findall(r"(GATEWAY_\w+)=", image))
    assert container["ports"] == [{"name": "https", "containerPort": 8443}]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    template = (ROOT / "deploy" / "gateway" / "nginx.conf.template").read_text(encoding="utf-8")
    (drain,) = re.findall(r"worker_shutdown_timeout (\d+)s", template)
    assert pod["terminationGracePeriodSeconds"] >= pause + int(drain) + 5
    budgets = {
        each["metadata"]["name"]: each["spec"] for each in of_kind("overlays/gateway", "PodDisruptionBudget")
    }
    assert deployment["replicas"] - budgets["gateway"]["maxUnavailable"] >= 1
    assert budgets["gateway"]["selector"] == deployment["selector"]


def test_canary_is_a_release_of_its_own_behind_a_service_of_its_own() -> None:
    deployments = {
        each["metadata"]["name"]: each["spec"] for each in of_kind("overlays/canary", "Deployment")
    }
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind("overlays/canary", "Service")}
    found = {}
    for name in ("triton", "triton-canary"):
        labels = deployments[name]["template"]["metadata"]["labels"].items()
        found[name] = [other for other in services if services[other]["selector"].items() <= labels]
    assert found == {"triton": ["triton"], "triton-canary": ["triton-canary"]}
    releases = [
        deployments[name]["template"]["spec"]["initContainers"][0]["env"][0]["value"] for name in found
    ]
    assert len(set(releases)) == 2


def test_gpu_is_asked_for_by_the_server_alone_and_does_not_round_more_than_the_golden_answers_allow() -> None:
    pod, container = server("overlays/gpu")
    asking = [
        each["name"]
        for _, each in containers("overlays/gpu")
        if "nvidia.com/gpu" in each["resources"]["limits"]
    ]
    assert asking == ["triton"]
    assert {"name": "NVIDIA_TF32_OVERRIDE", "value": "0"} in container["env"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_metrics_are_scraped_from_every_service_of_triton() -> None:
    (monitor,) = of_kind("overlays/canary", "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    services = of_kind("overlays/canary", "Service")
    chosen = [
        each["metadata"]["name"]
        for each in services
        if monitor["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
        and endpoint["port"] in [port["name"] for port in each["spec"]["ports"]]
    ]
    assert chosen == ["triton", "triton-canary"]


@pytest.mark.parametrize("name", ["training/jobset", "training/trainjob"])
def test_exit_codes_of_training_mean_the_same_to_the_cluster(name: str) -> None:
    """75: run me again, and that does not count. 2: never again. All else: three times, all pods together."""
    (template,) = (
        each["spec"] if each["kind"] == "JobSet" else each["spec"]["template"]["spec"]
        for each in of_kind(name, "JobSet", "TrainingRuntime")
    )
    job = template["replicatedJobs"][0]["template"]["spec"]
    rules = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in job["podFailurePolicy"]["rules"]
    ]
    assert rules == [("Ignore", [os.EX_TEMPFAIL]), ("Ignore", None), ("FailJob", [UsageError.exit_code])]
    assert job["backoffLimit"] == 0, "ranks that lost one of theirs cannot go on; all start again"
    assert job["podReplacementPolicy"] == "Failed", "a run has one writer at a time"
    assert template["failurePolicy"]["maxRestarts"] == 3
    assert template["failurePolicy"]["rules"][0] == {
        "name": "wrong-usage",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    assert pod["containers"][0]["command"] == ["python", "-m", "train.torchrun"]
    assert pod["terminationGracePeriodSeconds"] >= 300


@pytest.mark.parametrize("name", ["training/jobset", "training/trainjob"])
def test_checkpoints_outlive_pods_and_every_pod_sees_them(name: str) -> None:
    claims = {
        each["metadata"]["name"]: each["spec"]["accessModes"]
        for each in of_kind(name, "PersistentVolumeClaim")
    }
    assert claims["runs"] == ["ReadWriteMany"]
    (config,) = of_kind(name, "ConfigMap")
    (pod,) = pods(name)
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert "directory: /runs" in config["data"]["training.yaml"]
    assert {"/runs", "/images", "/config", "/dev/shm"} <= mounts
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "config")
    assert volume["configMap"]["name"] == config["metadata"]["name"]


def test_ranks_of_a_jobset_find_each_other() -> None:
    (jobset,) = of_kind("training/jobset", "JobSet")
    name, (job,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    arguments = job["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--nnodes={job['template']['spec']['completions']}" in arguments
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"]
    assert f"--master-addr={name}-{job['name']}-0-0.{name}" in arguments
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True


def test_versions_of_kubernetes_are_stated_in_the_docs() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert f"{OLDEST} and {NEWEST}" in text
