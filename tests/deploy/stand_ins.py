"""Images in place of those that cannot be pulled here: a program of Debian's, with the entry point of the real one.

They show that Compose's file starts, confines and connects such a program, and nothing about what is in the real image.
"""

from collections.abc import Sequence
from pathlib import Path

import docker

from deploy import program_image

NOBODY = 65534
# What health checks of the real images call, too.
APPLETS = ("sh", "wget", "cat", "httpd")
# What Debian's Alertmanager reads from there, and the real one has in itself.
TEMPLATES = Path("/usr/share/prometheus/alertmanager")


def make(client: docker.DockerClient, image: str, program: str, entry_point: Sequence[str]) -> None:
    """Give `client` an image of that name, from which `program` runs as nobody: `entry_point[0]` is where it lies."""
    repository, tag = image.rsplit(":", 1)
    contents = {entry_point[0]: program_image.found(program)}
    if program == "prometheus-alertmanager":
        contents[str(TEMPLATES)] = TEMPLATES
    archive = program_image.archive(contents, APPLETS, folders=["prometheus"])
    changes = [f"USER {NOBODY}:{NOBODY}", f"ENTRYPOINT {list(entry_point)}".replace("'", '"')]
    client.api.import_image_from_data(archive, repository, tag, changes=changes)
