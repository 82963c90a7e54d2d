"""The main job, from a folder of odd images to answers of a real Triton server."""

import json
import re
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout, end, outcome
from tests.integration.images import CLASSES

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIG = """
run: {{name: odd}}
data: {{root: "{root}", workers: 0}}
image: {{size: 16, resize: 20}}
model: {{name: squeezenet1_1, stem: small}}
training: {{epochs: 2, batch_size: 16, log_every: 1}}
export: {{max_batch: 8, golden_limit: 12}}
"""


def everything_made(checkout: Checkout) -> dict[Path, int]:
    """Every file of every stage with its time of modification; the report may be written anew."""
    folders = ("runs", "bundles", "model_repository/releases")
    return {
        path: path.stat().st_mtime_ns
        for folder in folders
        for path in (checkout.directory / folder).rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.name not in ("report.html", "smoke.json")
    }


@pytest.mark.usefixtures("usual_ports_taken")
def test_pipeline_serves_every_image_as_evaluated(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Case D01 and case A03, end to end: started twice at once, from another directory, in a path with spaces."""
    config = tmp_path / "odd.yaml"
    config.write_text(CONFIG.format(root=odd_folder), encoding="utf-8")
    command = [str(checkout.directory / "scripts" / "pipeline.py"), "--config", str(config)]
    both = [checkout.start(*command) for _ in range(2)]
    try:
        for process in both:
            result = outcome(process)
            assert result.returncode == 0, result.stderr
            check_table(result.stdout)
    finally:
        for process in both:
            end(process)
    check_labels(checkout)

    before = everything_made(checkout)
    again = checkout.run(*command)
    assert again.returncode == 0, again.stderr
    check_table(again.stdout)
    for stage in ("trained already", "evaluated already", "exported already", "already published"):
        assert stage in again.stderr
    assert everything_made(checkout) == before


def check_table(table: str) -> None:
    for protocol in ("HTTP", "gRPC"):
        served = re.search(rf"{protocol}\s+(\d+)/(\d+) agree", table)
        assert served, table
        assert served.groups() == ("120", "120")
    assert re.search(r"parity\s+passed", table), table
    report = Path(re.search(r"report\s+(.+)", table)[1].strip())  # type: ignore[index]
    assert "<html" in report.read_text(encoding="utf-8")


def check_labels(checkout: Checkout) -> None:
    """Case A03: the class list is equal byte for byte wherever it is."""
    names = "".join(f"{name}\n" for name in sorted(CLASSES)).encode()
    files = [*checkout.directory.glob("bundles/**/labels.txt")]
    files += checkout.directory.glob("model_repository/releases/**/labels.txt")
    assert len(files) == 3
    assert {file.read_bytes() for file in files} == {names}
    (signature,) = checkout.directory.glob("runs/*/checkpoints/step-00000010/signature.json")
    assert json.loads(signature.read_text())["classes"] == sorted(CLASSES)


def test_damaged_image_ends_the_pipeline_with_its_name(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Case A07: one clear line says what and where."""
    bad = odd_folder / "train" / "3" / "plain.png"
    bad.write_bytes(bad.read_bytes()[:60])
    config = tmp_path / "odd.yaml"
    config.write_text(CONFIG.format(root=odd_folder), encoding="utf-8")
    result = checkout.run(str(checkout.directory / "scripts" / "pipeline.py"), "--config", str(config))
    assert result.returncode == 1
    assert f" {bad}: DAMAGED: " in result.stderr
    assert result.stderr.rstrip().splitlines()[-1].startswith("error: [1/8] data failed")
    assert "Traceback" not in result.stderr
