"""In a container, training is run by a user whom nobody has given a name. No container is needed to be one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.checkout import ROOT
from tests.integration.training import options
from tests.programs import cannot_run, require

pytestmark = pytest.mark.integration

USER = 12345
NAMELESS = ["unshare", "--user", f"--map-user={USER}", f"--map-group={USER}"]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """What the image for training tells its processes, but for the folders, which are ours here."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (stage,) = re.findall(r"(?ms)^FROM \S+ AS train$(.*?)^ENTRYPOINT", text)
    found = dict(re.findall(r"\b([A-Z_]+)=(\S+)", stage))
    assert found.keys() >= {"USER", "HOME", "TORCHINDUCTOR_CACHE_DIR"}
    ours = {
        name: value.replace("/tmp", str(tmp_path)) for name, value in found.items() if "/app" not in value
    }
    del ours["PATH"]
    return {"PATH": os.environ["PATH"], **ours}


def test_training_needs_no_name_of_its_user(
    odd_images: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    """Case E03. What torch caches asks for the name, which only the image's variables can answer."""
    require("unshare")
    try_out = [*NAMELESS, sys.executable, "-c", "import getpass; print(getpass.getuser())"]
    nameless = {name: value for name, value in variables.items() if name != "USER"}
    asked = subprocess.run(try_out, env=nameless, capture_output=True, text=True, check=False)
    if "Operation not permitted" in asked.stderr:
        cannot_run(f"nobody may become another user here: {asked.stderr.strip()}")
    assert f"uid not found: {USER}" in asked.stderr
    train = ["-m", "train", "fit", *options(odd_images, tmp_path / "runs"), "--debug.mode=one-batch"]
    done = subprocess.run(
        [*NAMELESS, sys.executable, *train],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_dir()
