"""Publish a trained model as a repository in Hugging Face's format, and copy a published one.

A repository is a folder, or one on the Hub. Only names that begin with hf:// use the network.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from samebits.errors import CheckpointError, ConfigError, cannot_read, printable
from samebits.extras import require
from samebits.inference.signature import (
    CARD,
    PUBLIC_KEY,
    SIGNATURE,
    Signature,
    check_signature,
    read_signing_key,
    sign,
    trusted_keys,
)
from samebits.inference.trained_model import TrainedModel
from samebits.plain_file import (
    MAX_BYTES,
    finite_numbers,
    json_text,
    open_stored,
    read_plain,
)
from samebits.provenance.run_files import RunFiles
from samebits.recipes.catalog import find, list_recipes
from samebits.scratch import scratch_folder
from samebits.storage.manifest import sha256_of_file
from samebits.storage.run_folder import folder_to_fill, is_published
from samebits.version import __version__

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig
    from samebits.engine.parts import Parts


# Repositories of models on the Hugging Face Hub: their names, and the network.


class HubName(NamedTuple):
    """A repository on the Hub."""

    repository: str  #: OWNER/NAME.
    revision: str | None  #: A branch, tag or commit; None: the default branch.


def hub_name(text: str) -> HubName | None:
    """Return the repository on the Hub that a text names; None if it names a folder."""
    if not text.startswith("hf://"):
        return None
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", text.removeprefix("hf://"))
    if match is None:
        raise ConfigError(
            f"{text} is no name of a model repository",
            allowed="hf://OWNER/NAME, or hf://OWNER/NAME@REVISION",
            fix="Correct the name, or give a folder.",
        )
    return HubName(match[1], match[2])


def upload(folder: Path, remote: HubName) -> str:
    """Upload a folder, into a new public repository if there is none, and return its address."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    name = remote.repository
    message = "Upload a model trained with Samebits"

    with _asking_hub(f"the model can't be uploaded to {name}"):
        api.create_repo(name, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, revision=remote.revision, commit_message=message
        )
    return f"https://huggingface.co/{name}"


def download(remote: HubName, names: Sequence[str]) -> Path:
    """Download the files of these names, and return the folder that links to them."""
    require("hub", "samebits pull hf://")
    import huggingface_hub

    name, revision = remote
    with _asking_hub(f"{name} can't be downloaded"):
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[*names])
        )


@contextmanager
def _asking_hub(problem: str) -> Iterator[None]:
    """Convert the errors of the Hub to errors for the user."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # the Hub's errors derive from these
        raise ConfigError(
            problem,
            cause=str(error).partition("\n")[0][:200] or type(error).__name__,
            fix="Check the name and the network, and log in with hf auth login to upload; or use a folder.",
        ) from error


_MODEL = "model.safetensors"
_CONFIG = "config.json"
_SETTINGS = "config.yaml"
_INFO = "dataset_info.json"
_RESULT = "result.json"
_PROVENANCE = "provenance.json"
_STEPS = "steps.bin"  # not in a run with record.steps=false
_FILES = (CARD, _MODEL, _CONFIG, _SETTINGS, _INFO, _RESULT, _PROVENANCE)
_OPTIONAL = (_STEPS, SIGNATURE, PUBLIC_KEY)
_WEIGHTS = "weights.safetensors"  # the name of _MODEL in a run folder
# Lists of files in a recipe's dataset info. They are not published: prediction does not need them.
FILE_LISTS = ("train", "held_out", "eval_sets", "skipped")


def push(run: Path, target: str, sign_key: Path | None = None) -> str:
    """Publish the final weights of a run with card and provenance.

    Args:
        target: A folder that does not exist or is empty; or `hf://OWNER/NAME`, which uses the network.
        sign_key: File of a private key that signs what is published; None: it is not signed.

    Returns:
        The folder, or the address of the repository.

    Raises:
        CheckpointError: The run is not complete, or was altered.
        ConfigError: The recipe is a file of the user, the folder is not empty, the key is
            none, or the upload fails.
    """
    require("hub", "samebits push")
    remote = hub_name(target)
    if remote is None:
        with folder_to_fill(Path(target).expanduser()) as folder:
            _write(run, folder, Path(target).name, sign_key)
        return str(Path(target).expanduser())
    with scratch_folder(Path(run)) as scratch:
        folder = scratch / "model"
        folder.mkdir()
        _write(run, folder, remote.repository, sign_key)
        return upload(folder, remote)


def pull(source: str, out: Path, any_signer: bool = False) -> Path:
    """Copy a model that `push` published, after checking its files. No code of it is run.

    Args:
        source: The folder of a model repository; or `hf://OWNER/NAME[@REVISION]`, which uses the network.
        out: Folder for the model; it must not exist or be empty.
        any_signer: Take it also if none of the user's trusted keys has signed it.

    Returns:
        The folder: a run folder for predict, eval and export.

    Raises:
        CheckpointError: A file is missing, the weights are not those of `provenance.json`, or the signature is
            wrong or of a key that is not trusted.
        ConfigError: The folder is not empty, the download fails, or the recipe is not part of Samebits.
    """
    out = Path(out).expanduser()
    remote = hub_name(source)
    with folder_to_fill(out) as model:
        folder = (
            Path(source).expanduser() if remote is None else download(remote, [*_FILES, *_OPTIONAL])
        )
        _copy(folder, model, may_link=remote is not None)
        _check(model, source)
        signature = signature_of(model)
        # Until the user trusts a key, that of a stranger is no worse than no signature.
        if signature.is_wrong or (signature.problem and trusted_keys() and not any_signer):
            raise CheckpointError(
                f"{source}: {signature.problem}",
                fix="Ask the publisher which key is theirs. To trust it: samebits trust KEY.pub.",
            )
    return out


def signature_of(model: Path) -> Signature:
    """Check who signed a model that was pulled; see `check_signature`."""
    own = {_MODEL: _WEIGHTS}
    return check_signature(
        model, {name: own.get(name, name) for name in (*_FILES, _STEPS, PUBLIC_KEY)}
    )


@contextmanager
def as_run(folder: Path) -> Iterator[Path]:
    """Yield a folder that `push` wrote as a run folder: a temporary copy, with no signature asked for."""
    if not is_published(os.listdir(folder)):
        yield folder
        return
    with scratch_folder(Path(tempfile.gettempdir())) as scratch:
        yield pull(str(folder), scratch / folder.absolute().name, any_signer=True)


def _copy(folder: Path, model: Path, may_link: bool) -> None:
    """Copy the files of a publication.

    Args:
        may_link: Whether files may be links: the Hub's cache consists of links to its own files.
    """
    for name in (*_FILES, *_OPTIONAL):
        path = folder / name
        if name in _OPTIONAL and not os.path.lexists(path):
            continue
        try:
            file = open_stored(path, 0 if may_link else os.O_NOFOLLOW)
        except OSError as error:
            fix = "Give the folder of a repository that samebits push wrote, or hf://OWNER/NAME."
            raise cannot_read(CheckpointError, path, error, fix) from None
        with file, (model / (_WEIGHTS if name == _MODEL else name)).open("xb") as copy:
            shutil.copyfileobj(file, copy, MAX_BYTES)


def _write(run: Path, folder: Path, model: str, sign_key: Path | None) -> None:
    from samebits.engine.build import build_from, build_parts, read_dataset_info
    from samebits.storage.weights import is_as_recorded

    signer = None if sign_key is None else read_signing_key(sign_key)
    trained = TrainedModel(Path(run))
    found, config = trained.settings()
    if config.recipe not in list_recipes():
        raise ConfigError(
            f"{run} was trained with the recipe file {config.recipe}, and push publishes no code",
            fix="Export the weights instead: samebits export RUN.",
        )
    trained.check_settings(found)
    if not is_as_recorded(run):
        raise CheckpointError(
            f"{run} has no final weights with a matching result.json",
            fix=f"Run samebits train --run-dir {run} --resume auto.",
        )
    info = read_dataset_info(run) or {}
    parts = build_parts(config, lambda: build_from(found, config, info, run))
    for name in (_PROVENANCE, _RESULT, *([_STEPS] if os.path.lexists(run / _STEPS) else [])):
        shutil.copyfile(run / name, folder / name)
    shutil.copyfile(run / _WEIGHTS, folder / _MODEL)
    settings = yaml.safe_load(read_plain(run / _SETTINGS))
    (folder / _SETTINGS).write_text(
        yaml.safe_dump(without_folders(settings), sort_keys=False), encoding="utf-8"
    )
    _write_json(folder / _INFO, {name: _published(name, value) for name, value in info.items()})
    _write_json(folder / _CONFIG, _network(config, parts))
    _write_card(
        folder / CARD,
        config,
        parts,
        RunFiles(run).result,
        "" if signer is None else signer.public_key.keyid,
    )
    if signer is not None:
        sign(folder, model, signer)


def _published(name: str, value: Any) -> Any:
    if name == "held_out_from":
        return None
    return type(value)() if name in FILE_LISTS and isinstance(value, dict | list) else value


def without_folders(value: Any) -> Any:
    """Reduce absolute paths in JSON to their last part: they name folders of one machine."""
    if isinstance(value, dict):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value


def _network(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """Describe the network in timm's format, so that timm can load its own networks."""
    name = str(getattr(getattr(config, "model", None), "name", config.recipe))
    head = {
        "num_classes": len(classes := list(parts.metadata.get("classes", ()))),
        "label_names": classes,
    }
    described = {"architecture": name.removeprefix("timm/"), "recipe": config.recipe, **head}
    if name.startswith("timm/") and parts.input_shape is not None:
        statistics = {key: list(parts.metadata[key]) for key in ("mean", "std")}
        described["pretrained_cfg"] = {**head, "input_size": list(parts.input_shape), **statistics}
    return described


def compare_network(run: Path, config: RunConfig, parts: Parts) -> list[str]:
    """Compare `config.json`, from which timm takes classes and statistics of a pulled model, with the run."""
    if not os.path.lexists(run / _CONFIG):
        return []
    stated = RunFiles(run).read_json(_CONFIG)
    return [
        f"{_CONFIG}: {name} is {stated.get(name)}, in the run {value}"
        for name, value in _network(config, parts).items()
        if stated.get(name) != value
    ]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_bytes(json_text(value, indent=2) + b"\n")


def _write_card(
    path: Path, config: RunConfig, parts: Parts, result: Mapping[str, Any], keyid: str
) -> None:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    name = str(result.get("name", config.recipe))
    monitored = parts.monitor[0]
    is_classifier = "classes" in parts.metadata and monitored == "top1"
    task = "image-classification" if is_classifier else "other"
    metrics = {
        printable(name): value for name, value in finite_numbers(result.get("metrics")).items()
    }
    network = str(getattr(getattr(config, "model", None), "name", ""))
    may_end_early = config.max_steps is not None or config.stop_early.patience is not None
    data = ModelCardData(
        library_name="timm" if network.startswith("timm/") else "samebits",
        pipeline_tag=task if is_classifier else None,
        tags=["samebits", config.recipe],
        model_name=name,
        eval_results=None
        if monitored not in metrics
        else [
            EvalResult(
                task,
                "own",
                "validation set",
                "accuracy" if monitored == "top1" else monitored,
                metrics[monitored],
                metric_name=monitored,
            )
        ],
    )
    rows = {
        "network": network,
        "epochs": "" if may_end_early else config.epochs,
        "steps": result.get("steps", ""),
        "global batch": config.global_batch,
        "optimizer": f"{config.optim.name}, learning rate {config.optim.lr:g}, {config.optim.schedule}",
        "seed": config.seed,
        "weights sha256": result.get("weights_sha256", ""),
        "signed by key": keyid,
        "Samebits": __version__,
        **{key: f"{value:.6g}" for key, value in list(metrics.items())[:20]},
    }
    table = "\n".join(
        f"| {_plain(key)} | {_plain(value)} |" for key, value in rows.items() if value != ""
    )
    ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# {_plain(name)}\n\n"
        f"Trained with Samebits, recipe {config.recipe}. `provenance.json` has settings, code, data and versions.\n\n"
        "```console\n$ samebits pull THIS --out model\n$ samebits predict model FILE\n```\n\n"
        f"| setting or metric | value |\n|---|---|\n{table}\n"
    ).save(path)


def _plain(value: object) -> str:
    """Return a text, such as a class name of a stranger's data, as one line of Markdown without markup."""
    return re.sub(r"([\\`*_{}\[\]()#!|<>~])", r"\\\1", " ".join(printable(str(value)).split()))


def _check(model: Path, source: str) -> None:
    expected = RunFiles(model).subjects.get(_WEIGHTS, "none")
    found = sha256_of_file(model / _WEIGHTS)
    if found != expected:
        raise CheckpointError(
            f"the weights of {source} are not those of its {_PROVENANCE}",
            given=f"SHA-256 {found}",
            allowed=f"SHA-256 {expected}",
            fix="Pull it again, or from another source.",
        )
    recipe = find(str(model / _SETTINGS)).recipe
    if recipe not in list_recipes():
        raise ConfigError(
            f"{source} was trained with the recipe {recipe}, which is not part of Samebits",
            fix="Update Samebits, or pull another model.",
        )
