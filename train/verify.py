"""A bundle carries its own proof: hash every file again, and ask every artefact its golden inputs again."""

import logging
from pathlib import Path

import numpy as np

from slipway.artefact import read_artefacts
from slipway.bundle import golden_pixels, open_bundle
from slipway.cpus import available_cpus
from slipway.signing import SIGNATURE, require_signed
from train import parity
from train.parity import Rows

logger = logging.getLogger(__name__)


def verify(directory: Path, public_key: Path | None = None) -> Path:
    """Returns `directory` once everything in it was found as it was proven, and as the owner of the key signed it.

    Raises:
        SignatureError: it is not signed by that key; nothing of it was loaded.
        SealError, ContractError, BundleError, ArtefactError: it is damaged, or it is not what it says.
        ParityError: an artefact answers here differently from the answers that the bundle carries.
    """
    if public_key is not None:
        require_signed(directory, public_key)
        logger.info("signed by the owner of %s", public_key)
    elif (directory / SIGNATURE).exists():
        logger.info("the bundle is signed, by whom is not known: name a public key with --key")
    opened = open_bundle(directory)
    golden = Rows(
        kind=parity.GOLDEN,
        names=[each.path.name for each in opened.golden],
        pixels=golden_pixels(opened),
        expected=np.stack([each.logits for each in opened.golden]),
        reference="the stored answer",
    )
    threads = available_cpus()
    for artefact in read_artefacts(directory):
        checks = parity.check_artefact(directory, artefact, [golden], opened.signature.max_batch, threads)
        if failures := [parity.describe(check) for check in checks if not check.passed]:
            raise parity.ParityError(f"{directory}: {failures[0]}")
        logger.info("%s answers its %d golden inputs as it did", artefact.file, len(opened.golden))
    logger.info("verified: %s", opened.release)
    return directory
