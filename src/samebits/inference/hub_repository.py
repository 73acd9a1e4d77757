"""Repositories of models on the Hugging Face Hub: their names, and the network."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from samebits.errors import ConfigError
from samebits.extras import require

_Answer = TypeVar("_Answer")


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

    api, name = huggingface_hub.HfApi(), remote.repository
    message = "Upload a model trained with Samebits"

    def send() -> None:
        api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, revision=remote.revision, commit_message=message)

    _ask_hub(send, f"the model can't be uploaded to {name}")
    return f"https://huggingface.co/{name}"


def download(remote: HubName, names: Sequence[str]) -> Path:
    """Download the files of these names, and return the folder that links to them."""
    require("hub", "samebits pull hf://")
    import huggingface_hub

    name, revision = remote
    return Path(
        _ask_hub(
            lambda: huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[*names]),
            f"{name} can't be downloaded",
        )
    )


def _ask_hub(function: Callable[[], _Answer], problem: str) -> _Answer:
    try:
        return function()
    except (OSError, ValueError, RuntimeError) as error:  # the Hub's errors derive from these
        raise ConfigError(
            problem,
            cause=str(error).partition("\n")[0][:200] or type(error).__name__,
            fix="Check the name and the network, and log in with hf auth login to upload; or use a folder.",
        ) from error
