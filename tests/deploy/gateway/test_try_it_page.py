"""The try-it page in a real browser, through the gateway, against a real Triton server."""

import base64
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import playwright.sync_api
import pytest
from playwright.sync_api import Browser, FilePayload, Page

from deploy.gateway.settings import Upstream
from serve import repository
from serve.release import open_release
from serve.server import serving
from slipway import hashing
from slipway.bundle import Bundle
from tests import images
from tests.deploy.gateway.conftest import Start
from tests.deploy.gateway.tools import Door
from tests.serve.tools import CPUS, Oracle, wait_until

pytestmark = pytest.mark.integration

PATIENCE_MS = 200_000
# Chromium drops every connection when anybody on this machine adds or removes a network interface, as container
# engines do.
ATTEMPTS = 10
NETWORK_CHANGED = "ERR_NETWORK_CHANGED"
PHOTO = images.encode(images.noise(4, 60, 100), "JPEG")
# As somebody's mouse does it: a file in the browser's own list, let go over the page.
DROP = """async ([name, type, text]) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const files = new DataTransfer();
    files.items.add(new File([bytes], name, { type }));
    document.getElementById("drop").dispatchEvent(
        new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
}"""
PASTE = DROP.replace('DragEvent("drop", { dataTransfer', 'ClipboardEvent("paste", { clipboardData')
# SHA-256 of what is drawn, in the order of the model's input: all red, all green, all blue.
DRAWN = """async () => {
    const canvas = document.getElementById("pixels");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const size = data.length / 4;
    const planes = Uint8Array.from({ length: 3 * size }, (_, at) => data[4 * (at % size) + Math.floor(at / size)]);
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", planes));
    return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}"""


@dataclass
class Visit:
    """A page in a browser, what the browser complained about, and what it asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self) -> None:
        """Load the page, again where the browser lost its connection and with it a part of the page."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(playwright.sync_api.Error):
                self.page.goto("/")
                self.page.wait_for_selector("#health.good", timeout=PATIENCE_MS / ATTEMPTS)
                return
        self.page.wait_for_selector("#health.good")

    def hear(self, kind: str, text: str) -> None:
        if kind == "error" and NETWORK_CHANGED not in text:
            self.complaints.append(text)

    def show(self, image: bytes, how: str = DROP, name: str = "photo.jpg", kind: str = "image/jpeg") -> None:
        self.page.evaluate(how, [name, kind, base64.b64encode(image).decode()])

    def reaches(self, state: str) -> None:
        """Wait for an answer or a refusal; ask again, as a person would, where the browser lost its connection."""
        for _ in range(ATTEMPTS):
            self.page.wait_for_selector("#result[data-state=answered], #result[data-state=refused]")
            if self.page.is_hidden("#problem") or self.text("problem-code") != "UNREACHABLE":
                break
            self.page.click("#ask")
        assert self.page.get_attribute("#result", "data-state") == state, self.text("result")

    def text(self, name: str) -> str:
        return self.page.inner_text(f"#{name}")


@contextlib.contextmanager
def visit(browser: Browser, door: Door, width: int = 1280) -> Iterator[Visit]:
    context = browser.new_context(
        ignore_https_errors=True, viewport={"width": width, "height": 900}, base_url=door.url
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    result = Visit(page)
    page.on("console", lambda message: result.hear(message.type, message.text))
    page.on("pageerror", lambda error: result.complaints.append(str(error)))
    page.on("request", lambda request: result.requests.append(request.url))
    result.open()
    yield result
    assert context.storage_state() == {"cookies": [], "origins": []}
    context.close()


@pytest.fixture
def page(browser: Browser, door: Door) -> Iterator[Visit]:
    with visit(browser, door) as visited:
        yield visited


@pytest.mark.parametrize("how", [DROP, PASTE], ids=["dropped", "pasted"])
def test_an_image_is_answered_as_any_client_would_be(
    page: Visit, door: Door, oracle: Oracle, how: str
) -> None:
    with door.client("http") as client:
        (expected,) = client.classify([PHOTO], top=10)
    page.page.fill("#key", door.key)
    page.show(PHOTO, how)
    page.reaches("answered")
    bars = page.page.eval_on_selector_all(
        "#bars li",
        "lines => lines.map(line => [line.children[0].innerText, Number(line.dataset.probability)])",
    )
    assert [name for name, _ in bars] == [name for name, _ in expected.top]
    assert [value for _, value in bars] == pytest.approx([value for _, value in expected.top], abs=1e-6)
    assert (page.text("label"), page.text("release")) == (expected.label, expected.release)
    assert page.text("probability") == f"{100 * expected.probability:.1f} %"
    assert page.text("round-trip").endswith(" ms")
    assert page.text("server-time").endswith(" ms")
    pixels = hashing.of_bytes(oracle.pixels(PHOTO).tobytes())
    assert page.text("sha256") == pixels
    assert page.page.evaluate(DRAWN) == pixels
    assert page.text("shape") == "3 × 32 × 32, RGB, 0 to 255"
    assert page.page.is_hidden("#seen-note")
    assert not page.complaints
    # Nothing came from, or went to, anywhere else.
    assert all(url.startswith((door.url, "blob:", "data:")) for url in page.requests)


def test_a_file_can_be_chosen_and_asked_about_by_keyboard_alone(page: Visit, door: Door) -> None:
    keyboard = page.page.keyboard
    keyboard.press("Tab")
    page.page.wait_for_selector("#file:focus", state="attached")
    with page.page.expect_file_chooser() as chooser:
        keyboard.press("Space")
    chooser.value.set_files(FilePayload(name="photo.png", mimeType="image/png", buffer=images.flat(7)))
    # It says what is missing, and leads there.
    page.page.wait_for_selector("#key:focus")
    assert page.text("waiting-text") == "Now type your API key."
    keyboard.type(door.key)
    keyboard.press("Enter")
    page.reaches("answered")
    assert page.text("label") == "7"
    assert not page.complaints


def test_a_refusal_is_shown_in_the_server_s_words_and_the_next_image_is_answered(
    page: Visit, door: Door
) -> None:
    page.page.fill("#key", door.key)
    page.show(images.BAD["html"])
    page.reaches("refused")
    assert page.text("problem-code") == "NOT_AN_IMAGE"
    assert page.text("problem-sentence").startswith("Not a decodable image (JPEG PNG")
    named = page.text("problem-id").removeprefix("Request ")
    wait_until(lambda: [line["status"] for line in door.log() if line["id"] == named] == [400])
    assert page.page.is_hidden("#answer")
    page.show(images.flat(7))
    page.reaches("answered")
    assert page.text("label") == "7"
    assert page.page.is_hidden("#problem")
    # The browser's own remark on an answer of that status.
    assert all("status of 400" in complaint for complaint in page.complaints)


def test_a_wrong_key_is_named(page: Visit) -> None:
    page.page.fill("#key", "slipway_wrong")
    page.show(images.flat(7))
    page.reaches("refused")
    assert page.text("problem-code") == "UNAUTHORIZED"
    assert page.text("problem-sentence").startswith("The key is missing or not known")


def test_pixels_of_another_release_are_said_to_be(
    browser: Browser, start: Start, upstreams: dict[str, Upstream]
) -> None:
    """With a canary, the two requests of the page may be answered by two releases."""
    with (
        start(stable=upstreams["stable"], canary=upstreams["canary"], canary_percent=50) as door,
        visit(browser, door) as visited,
    ):
        visited.page.fill("#key", door.key)
        for _ in range(100):
            visited.show(images.flat(7))
            visited.reaches("answered")
            if visited.page.is_visible("#seen-note"):
                break
        releases = {visited.text("release"), visited.text("seen-note").split()[-1].rstrip(".")}
        assert {release.split("/")[0] for release in releases} == {"stable", "canary"}


def test_a_fused_release_is_answered_without_its_pixels(
    browser: Browser, start: Start, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    """It is one model, and gives nobody what it hands on inside."""
    release = open_release(
        repository.publish(bundles["stable"].directory, tmp_path, "embedded", CPUS, fused=True)
    )
    with (
        serving(release) as server,
        start(stable=Upstream(http=server.http, grpc=server.grpc)) as door,
        visit(browser, door) as visited,
    ):
        visited.page.fill("#key", door.key)
        visited.show(images.flat(7))
        visited.reaches("answered")
        assert visited.text("label") == "7"
        assert visited.page.is_hidden("#seen")
        assert visited.page.is_hidden("#problem")


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_nothing_is_wider_than_the_window_and_the_answer_is_in_it(
    browser: Browser, door: Door, width: int
) -> None:
    with visit(browser, door, width) as visited:
        visited.page.fill("#key", door.key)
        visited.show(PHOTO)
        visited.reaches("answered")
        assert visited.page.evaluate("document.documentElement.scrollWidth") <= width
        # Nor is the answer below what is seen of it.
        top = visited.page.evaluate("document.getElementById('label').getBoundingClientRect().top")
        assert 0 <= top < 900
