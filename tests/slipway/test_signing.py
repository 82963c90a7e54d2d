"""What the owner of a key signed is that, or it is refused. Keys are made here, by openssl's own library."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from slipway import bundle
from slipway.signing import SIGNATURE, SignatureError, require_signed, sign, signer
from tests.slipway.test_bundle import make_bundle


def pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def make_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """The PEM files of a private key and of its public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    private.write_bytes(pem(key))
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A sealed bundle, and the public key of its owner."""
    private, public = make_keys(tmp_path, "owner")
    return make_bundle(tmp_path / "1", lambda staging: sign(staging, private)), public


def overwrite(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def test_untouched_bundle_is_as_its_owner_signed_it(signed: tuple[Path, Path]) -> None:
    require_signed(*signed)


@pytest.mark.parametrize("name", [bundle.MODEL, bundle.LABELS, bundle.GOLDEN_ANSWERS, SIGNATURE])
def test_tampered_byte_is_refused(signed: tuple[Path, Path], name: str) -> None:
    directory, public = signed
    content = (directory / name).read_bytes()
    overwrite(directory / name, bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(SignatureError, match=r"is not as the owner of .*owner\.pub signed it"):
        require_signed(directory, public)


def test_swapped_label_file_is_refused_although_its_hash_was_swapped_too(
    signed: tuple[Path, Path], tmp_path: Path
) -> None:
    _, public = signed

    def swap(staging: Path) -> None:
        (staging / SIGNATURE).write_bytes((signed[0] / SIGNATURE).read_bytes())
        (staging / bundle.LABELS).write_bytes(b"2\n10\n1\n0\n")

    with pytest.raises(SignatureError, match=r"Hash mismatch for .*labels\.txt"):
        require_signed(make_bundle(tmp_path / "2", swap), public)


def test_foreign_key_is_refused(signed: tuple[Path, Path], tmp_path: Path) -> None:
    _, foreign = make_keys(tmp_path, "somebody")
    with pytest.raises(SignatureError, match=r"is not as the owner of .*somebody\.pub signed it"):
        require_signed(signed[0], foreign)


def test_added_file_is_refused(signed: tuple[Path, Path]) -> None:
    directory, public = signed
    (directory / "model.pt2").write_bytes(b"another model")
    with pytest.raises(SignatureError, match=r"model\.pt2"):
        require_signed(directory, public)


def test_bundle_without_a_signature_is_refused_where_a_key_is_named(tmp_path: Path) -> None:
    _, public = make_keys(tmp_path, "owner")
    with pytest.raises(SignatureError, match=r"1: is not signed \(no model\.sig\)"):
        require_signed(make_bundle(tmp_path / "1"), public)


def test_missing_public_key_is_told(signed: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match=r"nobody\.pub: there is no such public key"):
        require_signed(signed[0], tmp_path / "nobody.pub")


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"no key",
        pem(rsa.generate_private_key(65537, 2048)),
        pem(ed25519.Ed25519PrivateKey.generate()),
    ],
    ids=["none", "no key", "RSA", "Ed25519"],
)
def test_useless_private_key_is_told(tmp_path: Path, content: bytes | None) -> None:
    key = tmp_path / "key.pem"
    if content is not None:
        key.write_bytes(content)
    (tmp_path / "bundle").mkdir()
    for attempt in (lambda: sign(tmp_path / "bundle", key), lambda: signer(key)):
        with pytest.raises(
            SignatureError, match=r"key\.pem: cannot sign with it .* PEM file of a private key"
        ):
            attempt()


def test_a_signer_is_known_by_the_public_key_alone(tmp_path: Path) -> None:
    owner, somebody = (make_keys(tmp_path, name)[0] for name in ("owner", "somebody"))
    assert signer(owner) == signer(owner) != signer(somebody)
