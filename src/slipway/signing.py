"""A bundle or a release signed by whoever made it, in the format of OpenSSF Model Signing, with keys of one's own.

    openssl ecparam -name prime256v1 -genkey -noout -out key.pem      # keep this one
    openssl ec -in key.pem -pubout -out key.pub                       # hand this one out

Hashes tell that nothing was changed by accident; whoever changes a file on purpose changes the hash beside it, too.
"""

from pathlib import Path

import model_signing
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from slipway import hashing
from slipway.errors import SlipwayError
from slipway.sealed import MANIFEST

SIGNATURE = "model.sig"


class SignatureError(SlipwayError):
    """Something could not be signed, or is not signed by the key it should be signed by."""


def sign(directory: Path, private_key: Path) -> None:
    """Sign every file in `directory` and write `model.sig` there; the manifest, which lists that, comes later.

    private_key: PEM, elliptic curve, without a passphrase. Raises SignatureError.
    """
    _read(private_key)
    try:
        config = model_signing.signing.Config()  # type: ignore[no-untyped-call]
        config.use_elliptic_key_signer(private_key=private_key).set_hashing_config(_every_file(directory))
        config.sign(directory, directory / SIGNATURE)
    except (OSError, ValueError, TypeError) as error:
        raise _useless(private_key, error) from error


def signer(private_key: Path) -> str:
    """Who signs with a key: the SHA-256 of its public part. Raises SignatureError."""
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashing.of_bytes(_read(private_key).public_key().public_bytes(encoding, form))


def require_signed(directory: Path, public_key: Path) -> None:
    """Raises SignatureError unless every file in `directory` is as the owner of the key signed it. Loads none."""
    signature = directory / SIGNATURE
    if not signature.is_file():
        raise SignatureError(
            f"{directory}: is not signed (no {SIGNATURE}); export.sign_key signs bundles, `publish --sign-key` releases"
        )
    if not public_key.is_file():
        raise SignatureError(f"{public_key}: there is no such public key")
    try:
        verifier = model_signing.verifying.Config()  # type: ignore[no-untyped-call]
        verifier.use_elliptic_key_verifier(public_key=public_key).set_hashing_config(_every_file(directory))
        verifier.verify(directory, signature)
    except Exception as error:
        raise SignatureError(
            f"{directory}: is not as the owner of {public_key} signed it ({type(error).__name__}: {error})"
        ) from error


def _read(private_key: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(private_key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _useless(private_key, error) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _useless(private_key, "it is on no elliptic curve")
    return key


def _useless(private_key: Path, why: object) -> SignatureError:
    return SignatureError(
        f"{private_key}: cannot sign with it ({why}); to sign with is the PEM file of a private key on an elliptic "
        "curve, without a passphrase"
    )


def _every_file(directory: Path) -> model_signing.hashing.Config:
    """All but the signature, and the manifest, which is written after it and lists the same files."""
    ignored = [directory / SIGNATURE, directory / MANIFEST]
    everything = model_signing.hashing.Config()  # type: ignore[no-untyped-call]
    return everything.set_ignored_paths(paths=ignored, ignore_git_paths=False)
