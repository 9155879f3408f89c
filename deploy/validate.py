"""Checks the examples: each object against the schema of its kind, and each pod template of any kind as a pod.

Needs the package kubernetes-validate, which has Kubernetes' schemas. Those of custom kinds are not in it.
"""

import pathlib
import sys

import kubernetes_validate
import yaml


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


def main():
    examples = sorted(pathlib.Path(__file__).parent.glob("examples/*.yaml"))
    checked = 0
    for path in examples:
        for document in yaml.safe_load_all(path.read_text()):
            own = [] if "." in document["apiVersion"].split("/")[0] else [document]
            for value in own + list(pods(document)):
                try:
                    kubernetes_validate.validate(value, kubernetes_validate.latest_version(), strict=True)
                except kubernetes_validate.ValidationError as error:
                    sys.exit(f"{path}: {value['kind']}: {'.'.join(map(str, error.path))}: {error.message}")
                checked += 1
    print(f"{len(examples)} files, {checked} objects and pods are valid")


if __name__ == "__main__":
    main()
