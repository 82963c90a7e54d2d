"""The configuration of monitoring, for tests: as it is, and in a hurry."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from slipway.paths import PROJECT_ROOT

MONITORING = PROJECT_ROOT / "deploy" / "monitoring"
PROMETHEUS = MONITORING / "prometheus"
ALERTMANAGER = MONITORING / "alertmanager" / "alertmanager.yml"
SECRET = "/run/secrets/slack_api_url"


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def copy_in_a_hurry(place: Path) -> Path:
    """Prometheus' configuration and rules, but it looks every second, and no alert waits. Returns prometheus.yml."""
    shutil.copytree(PROMETHEUS, place)
    config = place / "prometheus.yml"
    config.write_text(config.read_text().replace("15s", "1s"))
    for file in (place / "rules").iterdir():
        content = read(file)
        for rule in (rule for group in content["groups"] for rule in group["rules"]):
            rule.pop("for", None)
        file.write_text(json.dumps(content))  # JSON is YAML
    return config


def alertmanager_in_a_hurry() -> str:
    return re.sub(r"group_(wait|interval): \w+", r"group_\1: 1s", ALERTMANAGER.read_text())
