"""The main job on images that lie in no folder: tar shards on a real S3 server."""

import json
import re
from pathlib import Path

import pytest

from tests.integration.checkout import Checkout
from tests.integration.images import CLASSES
from tests.s3 import s3_server
from tests.train.sources import s3_access, upload, write_shards

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CONFIG = """
run: {{name: shards}}
data: {{source: shards, url: "s3://photos/odd", classes: "{classes}", workers: 2}}
image: {{size: 16, resize: 20}}
model: {{name: squeezenet1_1, stem: small}}
training: {{epochs: 1, batch_size: 16, log_every: 1}}
export: {{max_batch: 8, golden_limit: 12}}
"""


def test_pipeline_on_shards_in_s3_serves_every_image_as_evaluated(
    checkout: Checkout, odd_folder: Path, tmp_path: Path
) -> None:
    """Cases D01 and A03: from the bucket to the answers of a server, with the classes in the order of people."""
    classes = tmp_path / "classes.txt"
    classes.write_text("".join(f"{name}\n" for name in CLASSES))
    config = tmp_path / "shards.yaml"
    config.write_text(CONFIG.format(classes=classes), encoding="utf-8")
    write_shards(odd_folder, tmp_path / "bucket" / "odd")
    with s3_server(tmp_path / "s3.log") as url, s3_access(url):
        upload(tmp_path / "bucket", "photos")
        result = checkout.run(str(checkout.directory / "scripts" / "pipeline.py"), "--config", str(config))
    assert result.returncode == 0, result.stderr
    for protocol in ("HTTP", "gRPC"):
        assert re.search(rf"{protocol}\s+120/120 agree", result.stdout), result.stdout
    (signature,) = checkout.directory.glob("bundles/shards/1/signature.json")
    assert tuple(json.loads(signature.read_text())["classes"]) == CLASSES
    (run,) = checkout.directory.glob("runs/shards-*")
    assert "data:image/" in (run / "report.html").read_text(encoding="utf-8")
