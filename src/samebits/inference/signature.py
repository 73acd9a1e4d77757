"""Who published a model: a signature of all its files, in the format of OpenSSF Model Signing.

    model.sig     a Sigstore bundle: an in-toto statement with the SHA-256 of each file, in a signed DSSE envelope
    signer.pub    the public key, one of the signed files; nothing trusts it because it is there

Keys are files in PEM format, and nothing here uses the network. The signatures are those of securesystemslib (ADR 66).
Format: https://github.com/ossf/model-signing-spec
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from samebits.errors import ConfigError, cannot_read, cannot_write_result
from samebits.extras import require
from samebits.plain_file import MAX_MEMORY_BYTES, json_text, parse_json, read_plain
from samebits.recipes.trust import check_unshared, list_path
from samebits.storage.manifest import sha256_of_file

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey

SIGNATURE = "model.sig"
PUBLIC_KEY = "signer.pub"
CARD = "README.md"
SIGNED_ROW = "| signed by key |"  # in the card: where the signature was taken away, the card still names the key
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_PREDICATE = "https://model_signing/signature/v1.0"
_MAX_KEY_BYTES = 64 * 1024
_MAX_BYTES = 1024 * 1024


class Signature(NamedTuple):
    """What the signature of a published model shows."""

    text: str  #: Whose it is, or that there is none; empty for a run folder that was not published.
    problem: str = ""  #: Why the model is not known to be its publisher's; empty: one of the user's trusted keys.
    is_wrong: bool = (
        False  #: Whether files and signature contradict each other, whatever the user trusts.
    )


def read_signing_key(path: Path) -> CryptoSigner:
    """Read a private key. Raises ConfigError if the file can't be read or is no key for signatures."""
    require("sign", "--sign-key")
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    fix = "Make one: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out my.key"
    try:
        private = load_pem_private_key(read_plain(path, _MAX_KEY_BYTES), None)
        return CryptoSigner(private, _key(private.public_key()))
    except OSError as error:
        raise cannot_read(ConfigError, f"--sign-key {path}", error, fix) from None
    except (ValueError, TypeError) as error:  # TypeError: the key has a password
        raise ConfigError(
            f"--sign-key {path} is no private key in PEM format", cause=str(error)[:200], fix=fix
        ) from None


def sign(folder: Path, model: str, signer: CryptoSigner) -> None:
    """Sign all files of a folder as those of a model: write `signer.pub` and `model.sig` into it."""
    from securesystemslib.dsse import Envelope

    (folder / PUBLIC_KEY).write_text(_pem(signer.public_key), encoding="utf-8")
    digests = {name: sha256_of_file(folder / name) for name in sorted(os.listdir(folder))}
    whole = hashlib.sha256(b"".join(map(bytes.fromhex, digests.values()))).hexdigest()
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": model, "digest": {"sha256": whole}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [],
            },
            "resources": [
                {"name": name, "algorithm": "sha256", "digest": each}
                for name, each in digests.items()
            ],
        },
    }
    envelope = Envelope(json_text(statement), _PAYLOAD, {})
    envelope.sign(signer)
    material = {"publicKey": {"hint": signer.public_key.keyid}, "tlogEntries": []}
    bundle = {
        "mediaType": _BUNDLE,
        "verificationMaterial": material,
        "dsseEnvelope": envelope.to_dict(),
    }
    (folder / SIGNATURE).write_bytes(json_text(bundle))


def check_signature(folder: Path, files: Mapping[str, str]) -> Signature:
    """Check the signature of a published model against the keys that the user trusts.

    A user who trusts no key asks for no signatures: a model without one is then no problem, and the text names it.

    Args:
        files: The published name of each file -> its name in the folder.
    """
    trusted = trusted_keys()
    present = {name: folder / own for name, own in files.items() if os.path.lexists(folder / own)}
    if not os.path.lexists(folder / SIGNATURE):
        # of a run folder, such as one's own; never published
        is_whole = os.path.lexists(folder / "environment.json")
        return _unsigned(present, len(trusted), is_whole=is_whole)
    require("sign", f"checking {SIGNATURE}")
    try:
        bundle = parse_json(read_plain(folder / SIGNATURE, _MAX_BYTES), MAX_MEMORY_BYTES)
        # The key that came with the model is enough to find out whether its files are those that were signed.
        own = folder / PUBLIC_KEY
        offered = {_read_public(own).keyid: own} if os.path.lexists(own) else {}
        keyid, model, digests = _signed(bundle, {**offered, **trusted})
        found = {name: sha256_of_file(path) for name, path in present.items()}
    # The file is a stranger's: securesystemslib's errors have no common class, and deep nesting is a RecursionError.
    except Exception as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        return Signature("wrongly signed", f"{SIGNATURE} is not valid: {reason}", is_wrong=True)
    known = trusted.get(keyid)
    text = f"{model!r} signed by {f'{known.stem}, ' if known else ''}key {keyid}"
    if wrong := dict(found.items() ^ digests.items()):
        return Signature(text, f"{min(wrong)} is not the file in {text}", is_wrong=True)
    return Signature(text, "" if known else f"{text}, which you do not trust")


def _unsigned(present: Mapping[str, Path], num_trusted: int, *, is_whole: bool) -> Signature:
    text = "not signed: its maker is not known"
    try:
        card = read_plain(present[CARD]) if CARD in present else b""
    except OSError as error:
        raise cannot_read(ConfigError, present[CARD], error, "Make it readable.") from None
    if SIGNED_ROW.encode() in card:
        return Signature(
            text,
            f"{SIGNATURE} is missing, and {CARD} names the key that signed the model",
            is_wrong=True,
        )
    if not is_whole and num_trusted:
        return Signature(
            text, f"{text}, and you trust {num_trusted} signing keys; --any-signer takes it"
        )
    return Signature(text if card or num_trusted else "")


def trusted_keys() -> dict[str, Path]:
    """Return the public keys that the user trusts as signers: fingerprint -> file.

    Raises:
        ConfigError: Other users can change them, or they can't be read.
    """
    folder = list_path().with_name("signers")
    try:
        found = sorted(folder.glob("*.pub"))
        for path in [folder, *found] if folder.is_dir() else []:
            check_unshared(path, "the trusted keys", path.stat())
        return {
            hashlib.sha256(read_plain(path, _MAX_KEY_BYTES)).hexdigest(): path for path in found
        }
    except OSError as error:
        raise cannot_read(
            ConfigError, f"the trusted keys in {folder}", error, "Make them readable."
        ) from None


def trust_key(path: Path) -> tuple[str, Path]:
    """Trust a public key as that of a signer, who is called as its file; return its fingerprint and the copy of it.

    Raises:
        ConfigError: It is no public key, another key has this name, or the copy can't be written.
    """
    require("sign", "samebits trust for a key")
    try:
        key = _read_public(path)
    except OSError as error:
        raise cannot_read(ConfigError, path, error, "Make it readable.") from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is no public key in PEM format",
            cause=str(error)[:200],
            fix="Make one of a private key: openssl pkey -in my.key -pubout -out my.pub",
        ) from None
    target = list_path().with_name("signers") / path.name
    if other := [
        each for each, file in trusted_keys().items() if file == target and each != key.keyid
    ]:
        raise ConfigError(
            f"{target} is another key",
            given=f"{path}: {key.keyid}\n{target}: {other[0]}",
            fix="Give the file another name; or remove the key that you trust no longer.",
        )
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_text(_pem(key), encoding="utf-8")
        target.chmod(0o600)
    except OSError as error:
        raise cannot_write_result(target, error) from None
    return key.keyid, target


def _signed(bundle: Any, keys: Mapping[str, Path]) -> tuple[str, str, dict[str, str]]:
    """Return the fingerprint of the key whose signature is right, the model's name, and the SHA-256 of its files."""
    from securesystemslib.dsse import Envelope

    keyid = bundle["verificationMaterial"]["publicKey"]["hint"]
    if keyid not in keys:
        raise ValueError(f"its key {str(keyid)[:64]} is neither trusted nor in {PUBLIC_KEY}")
    sealed = bundle["dsseEnvelope"]
    (only,) = sealed["signatures"]
    # Other programs leave the name of the key here empty.
    envelope = Envelope.from_dict({**sealed, "signatures": [{"sig": only["sig"], "keyid": keyid}]})
    envelope.verify([_read_public(keys[keyid])], 1)
    statement = parse_json(envelope.payload, MAX_MEMORY_BYTES)
    if envelope.payload_type != _PAYLOAD or statement["predicateType"] != _PREDICATE:
        raise ValueError(f"it signs {str(statement['predicateType'])[:100]}, no model")
    resources = statement["predicate"]["resources"]
    digests = {
        str(each["name"]): str(each["digest"])
        for each in resources
        if each["algorithm"] == "sha256"
    }
    if len(digests) != len(resources):
        raise ValueError("it names a file twice, or without a SHA-256")
    return keyid, str(statement["subject"][0]["name"])[:100], digests


def _read_public(path: Path) -> SSlibKey:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    return _key(load_pem_public_key(read_plain(path, _MAX_KEY_BYTES)))


def _key(public: Any) -> SSlibKey:
    from securesystemslib.signer import SSlibKey

    key = SSlibKey.from_crypto(public)
    if key.keytype != "ecdsa":
        raise ValueError(
            f"it is of kind {key.keytype}, and OpenSSF Model Signing has P-256, P-384 and P-521"
        )
    # The fingerprint of OpenSSF Model Signing: the SHA-256 of the key's PEM text, as sha256sum prints it.
    return SSlibKey.from_crypto(public, keyid=hashlib.sha256(_pem(key).encode()).hexdigest())


def _pem(key: SSlibKey) -> str:
    return str(key.keyval["public"])
