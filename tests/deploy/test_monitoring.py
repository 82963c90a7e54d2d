"""Alerts fire where they should, lead to a page that says what to do, and ask for metrics that are there."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.metrics import LATENCY_EDGES
from slipway.paths import PROJECT_ROOT
from tests.deploy.monitoring import ALERTMANAGER, MONITORING, PROMETHEUS, read
from tests.programs import require

DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))
RUNBOOKS = PROJECT_ROOT / "docs" / "runbooks"
CASES = sorted((PROJECT_ROOT / "tests" / "deploy" / "prometheus").glob("*.yml"))
SECTIONS = ("Meaning", "Impact", "Check", "Act")
GRAFANA_SCHEMA = 39  # of Grafana 11


def rules() -> list[dict[str, Any]]:
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    return [rule for file in files for group in read(file)["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            yield f"{file.name}: {panel['title']}", panel


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for _, panel in panels() for target in panel["targets"])


def succeed(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_and_alertmanager_accept_their_configuration() -> None:
    require("promtool", "amtool")
    succeed("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    succeed("amtool", "check-config", ALERTMANAGER)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_alerts_fire_where_they_should_and_nowhere_else(case: Path) -> None:
    require("promtool")
    succeed("promtool", "test", "rules", case)


def test_every_alert_has_a_case_that_fires_it() -> None:
    fired = {
        check["alertname"]
        for case in CASES
        for test in read(case)["tests"]
        for check in test["alert_rule_test"]
        if check.get("exp_alerts")
    }
    assert fired == {alert["alert"] for alert in alerts()}


def test_every_alert_leads_to_its_runbook_and_every_runbook_belongs_to_one() -> None:
    names = {alert["alert"] for alert in alerts()}
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == names
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/runbooks/{alert['alert']}.md"
        assert alert["labels"]["severity"] in ("critical", "warning", "none")
        assert {"summary", "description"} <= alert["annotations"].keys()


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_a_runbook_says_what_it_means_and_what_to_do(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    assert re.findall(r"(?m)^\*\*(\w+)\.\*\* ", text) == list(SECTIONS)


def test_objectives_are_edges_of_the_histogram_that_they_are_asked_of() -> None:
    named = {float(edge) for query in queries() for edge in re.findall(r'le="([\d.]+)"', query)}
    assert named
    assert named <= set(LATENCY_EDGES)


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=Watchdog severity=none", "watchdog"),
        ("alertname=ServiceDown severity=critical", "on-call"),
        ("alertname=QueueLong severity=warning", "team"),
    ],
)
def test_who_is_told(labels: str, receiver: str) -> None:
    require("amtool")
    told = succeed("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels.split())
    assert told.strip() == receiver


def test_no_secret_stands_in_the_configuration() -> None:
    text = ALERTMANAGER.read_text()
    assert "slack_api_url_file: /run/secrets/slack_api_url" in text
    assert "://" not in text


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_dashboard_is_complete(file: Path) -> None:
    """There is no Grafana here to load it: what can be checked is its form, and its queries below."""
    dashboard = json.loads(file.read_text())
    assert dashboard["schemaVersion"] == GRAFANA_SCHEMA
    assert dashboard["uid"] == f"slipway-{file.stem}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    source = read(MONITORING / "grafana" / "provisioning" / "datasources" / "prometheus.yml")["datasources"][
        0
    ]
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_panel_says_what_it_shows_and_in_which_unit(file: Path) -> None:
    for panel in json.loads(file.read_text())["panels"]:
        title, options = panel["title"], panel.get("options", {})
        assert panel["description"].endswith("."), title
        assert "unit" in panel["fieldConfig"]["defaults"], title
        several = [target for target in panel["targets"] if " by (" in target["expr"]]
        assert all("{{" in target["legendFormat"] for target in several), title
        if panel["type"] == "stat" and several:
            assert "name" in options["textMode"], title  # or the number stands there for nobody
        if panel["type"] == "heatmap":  # or buckets are shown as they are counted: each with all below it
            assert (panel["targets"][0]["format"], options["calculate"]) == ("heatmap", False), title


def test_prometheus_understands_every_query_of_a_dashboard(tmp_path: Path) -> None:
    require("promtool")
    listed = [
        {"record": f"query:{number}", "expr": target["expr"]}
        for number, target in enumerate(target for _, panel in panels() for target in panel["targets"])
    ]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": listed}]}))  # JSON is YAML
    assert f"{len(listed)} rules found" in succeed("promtool", "check", "rules", file)


def test_a_page_that_is_named_in_a_dashboard_exists() -> None:
    named = [name for _, panel in panels() for name in re.findall(r"Runbook: (\w+)", panel["description"])]
    assert named
    assert all((RUNBOOKS / f"{name}.md").is_file() for name in named)
