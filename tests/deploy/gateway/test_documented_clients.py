"""The requests of docs/clients.md, as they would be copied, to a real Triton server and through the gateway."""

import contextlib
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page

from serve.server import Server
from tests import images
from tests.deploy.gateway.tools import Door
from tests.programs import require
from tests.serve.tools import Oracle

pytestmark = pytest.mark.integration

PAGE = (Path(__file__).parents[3] / "docs" / "clients.md").read_text(encoding="utf-8")
# Its length in four bytes has some that a shell would lose: 0, and a line feed.
PHOTO = images.encode(images.noise(4, 60, 100), "JPEG")
PHOTO += bytes((10 - len(PHOTO)) % 256)
ATTEMPTS = 10
LOST = re.compile("Failed to fetch|ERR_NETWORK_CHANGED")


def documented(language: str) -> str:
    (block,) = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)
    return block


def best(oracle: Oracle) -> list[tuple[str, float]]:
    probabilities = oracle.probabilities(PHOTO)
    names = oracle.signature.classes
    return [(names[index], float(probabilities[index])) for index in probabilities.argsort()[::-1][:3]]


def ask_with_curl(shell: str, url: str, image: Path, options: str = "") -> Any:
    command = (
        documented("sh").replace("http://127.0.0.1:8000", url).replace("cat.jpg", shlex.quote(str(image)))
    )
    command = command.replace("curl -sS", f"curl -sS {options}")
    done = subprocess.run([shell, "-c", command], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_curl_is_answered_with_names_by_a_server_and_through_the_gateway(
    shell: str, servers: dict[str, Server], door: Door, oracle: Oracle, tmp_path: Path
) -> None:
    require("curl")
    image = tmp_path / "image"
    image.write_bytes(PHOTO)
    options = f'--cacert {shlex.quote(str(door.settings.certificate))} -H "Authorization: Bearer {door.key}"'
    for answer in (
        ask_with_curl(shell, f"http://{servers['stable'].http}", image),
        ask_with_curl(shell, door.url, image, options),
    ):
        tensors = {output["name"]: output["data"] for output in answer["outputs"]}
        assert tensors["release"][0].startswith("stable/1@")
        entries = [entry.split(":") for entry in tensors["probabilities"]]
        assert [name for _, _, name in entries] == [name for name, _ in best(oracle)]
        assert [float(value) for value, _, _ in entries] == pytest.approx(
            [value for _, value in best(oracle)], abs=1e-5
        )


def test_curl_is_told_what_is_wrong_with_an_image(servers: dict[str, Server], tmp_path: Path) -> None:
    require("curl")
    (tmp_path / "image").write_bytes(b"no image\n")
    answer = ask_with_curl("sh", f"http://{servers['stable'].http}", tmp_path / "image")
    assert re.search(r", NOT_AN_IMAGE: .+$", answer["error"])


def test_javascript_is_answered_with_names(browser: Browser, door: Door, oracle: Oracle) -> None:
    with contextlib.closing(browser.new_page(ignore_https_errors=True)) as page:
        answer = in_browser(page, door, PHOTO)
    assert answer["release"].startswith("stable/1@")
    assert [entry["name"] for entry in answer["classes"]] == [name for name, _ in best(oracle)]
    assert [entry["probability"] for entry in answer["classes"]] == pytest.approx(
        [value for _, value in best(oracle)], abs=1e-5
    )


def test_javascript_is_told_what_is_wrong_with_an_image(browser: Browser, door: Door) -> None:
    with (
        contextlib.closing(browser.new_page(ignore_https_errors=True)) as page,
        pytest.raises(Error, match=r"400: .*NOT_AN_IMAGE: "),
    ):
        in_browser(page, door, b"no image")


def in_browser(page: Page, door: Door, image: bytes) -> Any:
    """What the documented function returns; called again where the browser lost its connection (test_try_it_page)."""
    ask = f"([image, url, key]) => {{ {documented('js')}; return classify(Uint8Array.from(image), {{ url, key }}); }}"

    def once() -> Any:
        page.goto(door.url)
        return page.evaluate(ask, [list(image), door.url, door.key])

    for _ in range(ATTEMPTS - 1):
        try:
            return once()
        except Error as error:
            if not LOST.search(error.message):
                raise
    return once()
