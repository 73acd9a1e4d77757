"""Signed models: who signed one is named, and every forgery is found by `samebits verify` without options."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner

from samebits.errors import CheckpointError, ConfigError
from samebits.inference.hub import as_run, pull, push, signature_of
from samebits.inference.signature import read_signing_key, sign, trust_key, trusted_keys
from samebits.replay.verify import Request, verify
from samebits.storage.manifest import sha256_of_file
from tests.runs import samebits


def _new_key(folder: Path, name: str) -> Path:
    signer = CryptoSigner.generate_ecdsa()
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.key").write_bytes(signer.private_bytes)
    (folder / f"{name}.pub").write_text(signer.public_key.keyval["public"], encoding="utf-8")
    return folder / f"{name}.key"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of alice, whom the user trusts, and of mallory."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("alice", "mallory"):
        _new_key(folder, name)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    samebits("train", "digits", "max_steps=2", "kernels=auto", "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def signed(runs: Path, keys: Path) -> Path:
    """That model, and another one, both signed by alice."""
    push(runs / "run", str(runs / "model"), keys / "alice.key")
    other = Path(shutil.copytree(runs / "model", runs / "other"))
    for name in ("model.safetensors", "steps.bin"):
        content = (other / name).read_bytes()
        (other / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    sha256 = {each: sha256_of_file(runs / each / "model.safetensors") for each in ("model", "other")}
    _replace("provenance.json", sha256["model"], sha256["other"])(other, runs, keys)
    _replace("result.json", '"steps": 2', '"steps": 3')(other, runs, keys)
    _replace("README.md", "# digits", "# other digits")(other, runs, keys)
    for name in ("model.sig", "signer.pub"):
        (other / name).unlink()
    sign(other, "other", read_signing_key(keys / "alice.key"))
    return runs


@pytest.fixture
def user(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who trusts alice's key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    trust_key(keys / "alice.pub")
    return tmp_path


def _replace(name: str, old: str, new: str) -> Callable[[Path, Path, Path], None]:
    def edit(folder: Path, runs: Path, keys: Path) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")

    return edit


def _take(*names: str) -> Callable[[Path, Path, Path], None]:
    def edit(folder: Path, runs: Path, keys: Path) -> None:
        for name in names:
            shutil.copyfile(runs / "other" / name, folder / name)

    return edit


def _remove(*names: str) -> Callable[[Path, Path, Path], None]:
    def edit(folder: Path, runs: Path, keys: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return edit


def _sign_again(folder: Path, runs: Path, keys: Path) -> None:
    for name in ("model.sig", "signer.pub"):
        (folder / name).unlink()
    sign(folder, "model", read_signing_key(keys / "mallory.key"))


def _bundle(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path, Path, Path], None]:
    def forge(folder: Path, runs: Path, keys: Path) -> None:
        bundle = json.loads((folder / "model.sig").read_bytes())
        edit(bundle)
        (folder / "model.sig").write_text(json.dumps(bundle), encoding="utf-8")

    return forge


def _all(*edits: Callable[[Path, Path, Path], None]) -> Callable[[Path, Path, Path], None]:
    def forge(folder: Path, runs: Path, keys: Path) -> None:
        for edit in edits:
            edit(folder, runs, keys)

    return forge


def _name_another_file(bundle: dict[str, Any]) -> None:
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    changed = payload.replace(b"README.md", b"readme.md")
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()


def _state_another_key(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"]["publicKey"]["hint"] = next(iter(trusted_keys()))


_ROW = "| signed by key |"
FORGERIES = {
    "another key": _sign_again,
    "another key under the trusted one's name": _all(_sign_again, _take("signer.pub"), _bundle(_state_another_key)),
    "no signature": _remove("model.sig", "signer.pub"),
    "no signature, and a card that tells of none": _all(
        _remove("model.sig", "signer.pub"), _replace("README.md", _ROW, "| digest |")
    ),
    "another model's signature": _take("model.sig"),
    "other weights under a good signature of the provenance": _take("model.safetensors"),
    "other weights with provenance and result that fit": _take("model.safetensors", "provenance.json", "result.json"),
    "a record of other steps": _take("steps.bin"),
    "other data": _replace("provenance.json", '"data":', '"data ":'),
    "another data set in the settings": _replace("config.yaml", "seed: 0", "seed: 1"),
    "other classes": _replace("config.json", '"0"', '"8"'),
    "a card that names another model": _take("README.md"),
    "a better metric in the card": _replace("README.md", "| top1 | 0.", "| top1 | 0.9"),
    "a list of files that is not the signed one": _bundle(_name_another_file),
    "a signature without content": _bundle(lambda each: each["dsseEnvelope"].update(signatures=[])),
    "a key that is none": _all(
        _remove("signer.pub"), lambda folder, runs, keys: (folder / "signer.pub").write_text("no key", encoding="utf-8")
    ),
    "a signature as deep as the stack": lambda folder, runs, keys: (folder / "model.sig").write_text("[" * 100_000),
}


def _verify(folder: Path) -> bool:
    """Whether a user who calls `samebits verify FOLDER` is told that it is verified."""
    try:
        with as_run(folder) as run:
            return verify(Request(run)).is_verified
    except (CheckpointError, ConfigError):
        return False


@pytest.mark.full
@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.one_in(3)
def test_a_forged_publication_is_found_without_options(signed: Path, keys: Path, user: Path, name: str) -> None:
    forged = Path(shutil.copytree(signed / "model", user / "model"))
    FORGERIES[name](forged, signed, keys)
    with pytest.raises((CheckpointError, ConfigError)):
        pull(str(forged), user / "pulled")
    assert not _verify(forged)
    # A copy that was not made by pull, such as a clone of the repository with the weights renamed.
    (forged / "model.safetensors").rename(forged / "weights.safetensors")
    assert not _verify(forged)


def test_a_signed_model_is_pulled_verified_and_rebuilt(signed: Path, keys: Path, user: Path) -> None:
    pulled = pull(str(signed / "model"), user / "pulled")
    verdict = verify(Request(pulled))
    fingerprint, name = next(iter(trusted_keys())), "'model' signed by alice"
    assert verdict.is_verified
    assert (verdict.share, len(verdict.replayed)) == (1.0, 1)
    assert f"{name}, key {fingerprint}" in verdict.notes
    assert signature_of(pulled).problem == ""
    assert _verify(signed / "model")


def test_a_key_is_named_and_not_trusted_because_it_comes_with_the_model(
    signed: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    pulled = pull(str(signed / "model"), tmp_path / "pulled")  # no key is trusted yet: the text tells of it
    assert "which you do not trust" in signature_of(pulled).problem
    assert not verify(Request(pulled)).is_verified
    assert verify(Request(pulled, any_signer=True)).is_verified
    trust_key(keys / "mallory.pub")
    with pytest.raises(CheckpointError, match="which you do not trust"):
        pull(str(signed / "model"), tmp_path / "again")
    trust_key(Path(shutil.copyfile(pulled / "signer.pub", tmp_path / "alice.pub")))
    assert verify(Request(pulled)).is_verified


def test_a_model_without_signature_says_nothing_of_its_maker(
    runs: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    push(runs / "run", str(tmp_path / "model"))
    verdict = verify(Request(pull(str(tmp_path / "model"), tmp_path / "pulled")))
    assert verdict.is_verified
    assert "not signed: its maker is not known" in verdict.notes
    assert not any("signed" in note for note in verify(Request(runs / "run")).notes)
    trust_key(keys / "alice.pub")
    with pytest.raises(CheckpointError, match="not signed"):
        pull(str(tmp_path / "model"), tmp_path / "again")
    assert pull(str(tmp_path / "model"), tmp_path / "again", any_signer=True).is_dir()
    assert verify(Request(runs / "run")).is_verified  # one's own run needs no signature
    assert "not signed: its maker is not known" in verify(Request(runs / "run")).notes


@pytest.mark.parametrize("removed", [("model.sig",), ("README.md", "model.sig"), ("README.md", "config.json")])
def test_a_pulled_model_that_lost_its_signature_is_not_verified(
    signed: Path, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: tuple[str, ...]
) -> None:
    """Where a key is trusted: with the card, it would name the key; without it, it would look like a run folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    trust_key(keys / "alice.pub")
    pulled = pull(str(signed / "model"), tmp_path / "pulled")
    for name in {*removed, "model.sig", "signer.pub"}:
        (pulled / name).unlink()
    verdict = verify(Request(pulled))
    assert not verdict.is_verified
    assert any(text.startswith(("not signed: ", "model.sig is missing")) for text in verdict.mismatches)


def test_keys_that_can_not_be_used_are_refused(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "text.pub").write_text("no key", encoding="utf-8")
    (tmp_path / "ed.pub").write_bytes((keys / "alice.pub").read_bytes())
    edwards = CryptoSigner.generate_ed25519()
    (tmp_path / "ed.key").write_bytes(edwards.private_bytes)
    for path in (tmp_path / "text.pub", keys / "alice.key", tmp_path / "missing.pub"):
        with pytest.raises(ConfigError):
            trust_key(path)
    with pytest.raises(ConfigError, match="P-256"):
        read_signing_key(tmp_path / "ed.key")
    _, copy = trust_key(keys / "alice.pub")
    with pytest.raises(ConfigError, match="is another key"):
        trust_key(Path(shutil.copyfile(keys / "mallory.pub", tmp_path / "alice.pub")))
    copy.chmod(0o666)
    with pytest.raises(ConfigError, match="can be changed by other users"):
        trusted_keys()
