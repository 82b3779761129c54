"""The files that start a coordinator on clusters: they parse, and so do the commands in them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler.__main__ import main

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
SCRIPTS = sorted([*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch")])
OURS = re.compile(r"(?:^|\s)(lightning-bytescheduler .*)")


def documents() -> dict[str, Any]:
    found = {}
    for path in DEPLOY.rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            found[document["kind"]] = document
    return found


def commands(text: str) -> list[str]:
    """Those of this package in a script or in comments, with variables in place."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [match[1].split("   (")[0] for line in lines if (match := OURS.search(line.lstrip("# ")))]
    return [re.sub(r"\$\(.*?\)|\$\{?\w+\}?", "x", one.replace('"', "")) for one in found]


@pytest.fixture
def parsed(monkeypatch):
    """Let a command parse its arguments and do nothing; returns them."""
    import argparse

    seen: list[argparse.Namespace] = []
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self, arguments=None):
        options = parse(self, arguments)
        seen.append(options)
        options.run = lambda _: 0
        return options

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    return seen


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert "set -euo pipefail" in path.read_text()


def test_commands_in_scripts_parse(parsed):
    found = [command for path in SCRIPTS for command in commands(path.read_text())]
    assert len(found) >= 2
    for command in found:
        assert main(shlex.split(command)[1:]) == 0, command
    assert len(parsed) == len(found)


def test_kubernetes_fits_together(parsed):
    kinds = documents()
    deployment, service, job = kinds["Deployment"], kinds["Service"], kinds["Job"]
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    container = pod["spec"]["containers"][0]
    assert main(container["command"][1:]) == 0
    options = parsed[0]
    assert deployment["spec"]["replicas"] == 1
    assert options.bind.endswith(f":{container['ports'][0]['containerPort']}")
    assert options.bind.endswith(f":{service['spec']['ports'][0]['port']}")
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for path in (options.state, *options.tls, options.token_file):
        assert any(path == mount or path.startswith(f"{mount}/") for mount in mounts), path
    names = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    claim = kinds["PersistentVolumeClaim"]["metadata"]["name"]
    assert any(volume.get("persistentVolumeClaim") == {"claimName": claim} for volume in pod["spec"]["volumes"])
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert job["spec"]["completionMode"] == "Indexed"
    worker = {one["name"]: one for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert worker["BYTESCHEDULER_COORDINATOR"]["value"] == f"https://{service['metadata']['name']}:7077"
    # A token is in no argument and in no plain variable.
    assert "valueFrom" in worker["BYTESCHEDULER_COORDINATOR_TOKEN"]
