"""The model card of a published model: README.md with metadata that the Hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.version import __version__

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig
    from samebits.engine.parts import Parts

_MAX_ROWS = 20


def write_card(path: Path, config: RunConfig, parts: Parts, result: Mapping[str, Any]) -> None:
    """Write the card.

    Args:
        path: The file.
        config: Settings of the run.
        parts: The recipe's parts.
        result: The content of `result.json`.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    name = str(result.get("name", config.recipe))
    is_classifier = "classes" in parts.metadata and parts.monitor[0] == "top1"
    metrics = {key: value for key, value in (result.get("metrics") or {}).items() if isinstance(value, int | float)}
    task = "image-classification" if is_classifier else "other"
    known = [
        EvalResult(task, "own", "validation set", "accuracy" if key == "top1" else key, metrics[key], metric_name=key)
        for key in [parts.monitor[0]]
        if key in metrics
    ]
    network = str(getattr(getattr(config, "model", None), "name", ""))
    data = ModelCardData(
        library_name="timm" if network.startswith("timm/") else "samebits",
        pipeline_tag=task if is_classifier else None,
        tags=["samebits", config.recipe],
        model_name=name,
        eval_results=known or None,
    )
    rows = [
        ("recipe", config.recipe),
        ("network", network),
        ("epochs", config.epochs),
        ("global batch", config.global_batch),
        ("micro-batch", config.micro_batch),
        ("optimizer", f"{config.optim.name}, learning rate {config.optim.lr:g}, {config.optim.schedule}"),
        ("seed", config.seed),
        ("mode", config.mode),
        ("weights sha256", result.get("weights_sha256", "")),
        ("root of the record", result.get("root", "")),
        ("Samebits", __version__),
    ]
    classes = list(parts.metadata.get("classes", ()))
    text = [
        f"# {name}",
        "",
        f"Trained with Samebits, recipe {config.recipe}. `provenance.json` records settings, code, data and versions.",
        "",
        "## Use",
        "",
        "```console",
        "$ samebits pull THIS --out model",
        "$ samebits predict model FILE",
        "```",
        "",
        "## Training",
        "",
        *_table(("setting", "value"), [(key, value) for key, value in rows if value != ""]),
        "",
        "## Evaluation",
        "",
        *_table(("metric", "value"), [(key, f"{value:.6g}") for key, value in list(metrics.items())[:_MAX_ROWS]]),
    ]
    if classes:
        more = f" and {len(classes) - _MAX_ROWS} more" if len(classes) > _MAX_ROWS else ""
        text += ["", "## Classes", "", ", ".join(classes[:_MAX_ROWS]) + more]
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(text) + "\n").save(path)


def _table(head: tuple[str, str], rows: list[tuple[str, Any]]) -> list[str]:
    lines = [f"| {key} | {str(value).replace('|', '/')} |" for key, value in rows]
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *lines]
