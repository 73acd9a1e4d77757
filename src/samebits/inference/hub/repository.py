"""Model repositories in Hugging Face's format: their files, and where they are (a folder, or the Hub).

    README.md                                    model card: metrics, settings, how to use the model
    model.safetensors                            the final weights, the bytes of weights.safetensors in the run folder
    config.json                                  network and classes; for networks of timm in timm's own format
    preprocessor_config.json                     resizing, crop and normalization, in the format of transformers
    config.yaml, dataset_info.json, result.json  what samebits needs to build the model and check its weights
    provenance.json                              how the model was made (ADR 36)

Only names that begin with hf:// use the network.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from samebits.errors import ConfigError

CARD, MODEL, CONFIG, PREPROCESSOR = "README.md", "model.safetensors", "config.json", "preprocessor_config.json"
SETTINGS, INFO, RESULT, PROVENANCE = "config.yaml", "dataset_info.json", "result.json", "provenance.json"
OF_RUN = (SETTINGS, INFO, RESULT, PROVENANCE)
FILES = (CARD, MODEL, CONFIG, PREPROCESSOR, *OF_RUN)
_SCHEME = "hf://"


class HubName(NamedTuple):
    """A repository on the Hub: `hf://OWNER/NAME`, with `@REVISION` at the end for one revision."""

    repository: str
    revision: str | None


def hub_name(text: str) -> HubName | None:
    """Return the repository on the Hub that a text names; None if it names a folder.

    Raises:
        ConfigError: It begins with hf://, but is no name of a repository.
    """
    if not text.startswith(_SCHEME):
        return None
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", text.removeprefix(_SCHEME))
    if match is None:
        raise ConfigError(
            f"{text} is no name of a model repository",
            allowed="hf://OWNER/NAME, or hf://OWNER/NAME@REVISION",
            fix="Correct the name, or give a folder.",
        )
    return HubName(match[1], match[2])
