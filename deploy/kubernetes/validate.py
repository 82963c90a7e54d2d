"""Check manifests without a cluster: every kind against a schema, and every field known.

    python -m deploy.kubernetes.validate deploy/kubernetes/overlays/cpu ...    each rendered by `kubectl kustomize`

Kubernetes' own kinds against the schemas that the package kubernetes-validate holds; those of operators against
schemas/, which are ours. Exits with 1 if a field or a kind is not known, or a value is not allowed.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator, ValidationError
from referencing import Registry, Resource
from ruamel.yaml import YAML

from slipway import command
from slipway.errors import SlipwayError, UsageError

# From the same lock as this Python's packages.
KUBECTL = Path(sys.executable).with_name("kubectl")
SCHEMAS = Path(__file__).parent / "schemas"
# The oldest that knows all we use (image volumes), and the newest that the package knows.
OLDEST, NEWEST = "1.31", "1.37"

Manifest = dict[str, Any]


class ManifestError(SlipwayError):
    """Kustomize makes nothing of a folder, or a cluster would refuse or ignore something in it."""


def main(folders: list[str]) -> None:
    """Raises UsageError, or ManifestError with a line for each problem."""
    if not folders:
        raise UsageError("name the folders to be checked, such as deploy/kubernetes/overlays/cpu")
    problems = [
        f"{folder}: {problem}"
        for folder in folders
        for manifest in render(Path(folder))
        for problem in problems_of(manifest)
    ]
    if problems:
        raise ManifestError("\n".join(problems))


def render(folder: Path) -> list[Manifest]:
    """What a kustomization makes. Raises ManifestError, in kubectl's words."""
    try:
        done = subprocess.run(
            [KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ManifestError(f"{KUBECTL}: was not found; `make lint` installs it") from None
    if done.returncode:
        raise ManifestError(f"{folder}: {done.stderr.strip()}")
    return [manifest for manifest in YAML(typ="safe").load_all(done.stdout) if manifest]


def problems_of(manifest: Manifest, versions: tuple[str, ...] = (OLDEST, NEWEST)) -> Iterator[str]:
    """What is wrong with a manifest, in each version of Kubernetes."""
    name = f"{manifest.get('kind')} {manifest.get('metadata', {}).get('name')}"
    schema = own_schema(manifest)
    for version in versions:
        try:
            if schema is None:
                kubernetes_validate.validate(manifest, version, strict=True)
            else:
                Draft202012Validator(schema, registry=_definitions(version)).validate(manifest)
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{name}: Kubernetes {version} has no such kind, and deploy/kubernetes/schemas has none"
        except ValidationError as error:  # of which kubernetes_validate's is one
            yield f"{name}, Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}"


def own_schema(manifest: Manifest) -> Any:
    """Ours for a kind of an operator, if we have one."""
    path = SCHEMAS / f"{manifest.get('kind')}-{str(manifest.get('apiVersion')).replace('/', '-')}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


@cache
def _definitions(version: str) -> Registry[Any]:
    """Kubernetes' own types, such as Container, strict, for schemas that refer to them."""
    packaged = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    text = (packaged / f"v{version}.0-local-strict" / "_definitions.json").read_text(encoding="utf-8")
    definitions: Resource[Any] = Resource.from_contents(json.loads(text))
    return definitions @ Registry()


if __name__ == "__main__":
    command.run(main)
