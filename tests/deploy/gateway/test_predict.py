"""`python -m serve predict` through the gateway: a key that nobody else sees, and a certificate that is believed."""

import subprocess
import sys
from pathlib import Path

import pytest

from serve import predict
from slipway.errors import SlipwayError, UsageError
from tests import images
from tests.deploy.gateway.tools import Door

pytestmark = pytest.mark.integration


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "3.png"
    path.write_bytes(images.flat(3))
    return path


def test_key_comes_from_the_environment_or_a_file(
    door: Door, image: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "serve", "predict", str(image), "--protocol", protocol]
    command += ["--url", f"{door.url}/", "--certificates", str(door.settings.certificate)]
    if protocol == "http":
        monkeypatch.setenv("SLIPWAY_API_KEY", door.key)
    else:
        (image.parent / "key").write_text(f"{door.key}\n")
        command += ["--api-key-file", str(image.parent / "key")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{image}: 3 (")


def test_what_is_wrong_with_key_or_certificate_is_said_with_what_to_do(
    door: Door, image: Path, protocol: str
) -> None:
    certificate = door.settings.certificate
    with pytest.raises(
        SlipwayError, match=r"UNAUTHORIZED: .*; a key comes from --api-key-file, or SLIPWAY_API_KEY"
    ):
        predict.run([str(image)], door.url, protocol, "text", print, api_key="x", certificates=certificate)
    with pytest.raises(SlipwayError, match="--certificates names whose certificates to believe"):
        predict.run([str(image)], door.url, protocol, "text", print, api_key=door.key)
    with pytest.raises(UsageError, match="an API key is only sent over TLS"):
        predict.run([str(image)], door.gateway.address, protocol, "text", print, api_key=door.key)
