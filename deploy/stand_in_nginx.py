"""A stand-in for nginx's image, for machines that cannot pull it: nginx, its JavaScript module and curl from here.

It has what the Dockerfile and a container of ours need: an entry point that fills in templates, and a shell. It has an
older nginx, and nothing else of a Debian. So it proves how our own image is built, started, confined and stopped, and
not that nginx's image can be pulled and behaves the same.
"""

import subprocess
from pathlib import Path

import docker

from deploy import program_image
from slipway import hashing

REPOSITORY = "slipway/stand-in-for-nginx"
# Path in the image -> program of Debian's.
PROGRAMS = {"/usr/sbin/nginx": "nginx", "/usr/bin/curl": "curl", "/usr/bin/envsubst": "envsubst"}
# Where Debian's nginx looks for it.
MODULE = Path("/usr/share/nginx/modules/ngx_http_js_module.so")
APPLETS = ("sh", "chmod", "env", "sed", "grep", "cat", "ls", "id")
ENTRY_POINT = """#!/bin/sh
# A stand-in: as nginx's own does, it fills in templates before nginx starts, with the variables that the filter names.
set -eu
if [ "$1" = nginx ]; then
    names="$(env | sed 's/=.*//' | grep "$NGINX_ENVSUBST_FILTER" | sed 's/.*/${&}/')"
    for template in /etc/nginx/templates/*.template; do
        made="${template##*/}"
        envsubst "$names" < "$template" > "$NGINX_ENVSUBST_OUTPUT_DIR/${made%.template}"
    done
fi
exec "$@"
"""
CHANGES = ["ENV PATH=/usr/sbin:/usr/bin:/bin", 'ENTRYPOINT ["/entry-point"]']


def ensure(client: docker.DockerClient) -> str:
    """The name of the stand-in in this engine; it is made if it is not there.

    Raises NoProgram: something that it is made of is missing.
    """
    contents = {place: program_image.found(program) for place, program in PROGRAMS.items()}
    if not MODULE.is_file():
        raise program_image.NoProgram(
            f"{MODULE}, to be put into an image, was not found; on Debian `make programs` installs it"
        )
    contents[str(MODULE)] = MODULE
    archive = program_image.archive(contents, APPLETS, script=ENTRY_POINT)
    tag = f"{version()}-{hashing.of_data([hashing.of_bytes(archive), CHANGES])[:12]}"
    name = f"{REPOSITORY}:{tag}"
    if not client.images.list(name):
        client.api.import_image_from_data(archive, REPOSITORY, tag, changes=CHANGES)
    return name


def version() -> str:
    """Of the nginx of this machine, such as 1.22.1. Raises NoProgram."""
    program = program_image.found("nginx")
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
    return said.rsplit("/", 1)[1].split()[0]
