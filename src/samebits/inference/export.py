"""Export a trained model to one file: safetensors, ONNX, or torch.export's program.

The file is written under a temporary name, loaded, and run. It is renamed only if its outputs match the model's.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.errors import CheckpointError, ConfigError, cannot_write_result, printable
from samebits.extras import require
from samebits.inference.trained_model import TrainedModel
from samebits.plain_file import json_text
from samebits.scratch import partial_path, sweep_partials
from samebits.version import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn


ENDINGS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2"}
# Largest difference allowed, as a share of the largest output: other kernels sum in a different order.
TOLERANCE = {"safetensors": 0.0, "onnx": 1e-4, "torch-export": 1e-4}
BATCHES = (2, 1, 5)  # batch sizes to check; the model is traced with the first
FIELD = "samebits.json"  # the file of metadata inside a torch-export file
INPUT = "input"
OUTPUT = "output"
BATCH = "batch"

Run = Callable[["Tensor"], "list[Tensor]"]


@dataclass(frozen=True)
class Exported:
    """An exported file whose outputs were checked."""

    path: Path  #: The file.
    num_bytes: int  #: Its size in bytes.
    difference: float  #: Largest difference between its outputs and the model's, as a share of the largest output.
    allowed: float  #: Largest difference allowed.
    input_shape: tuple[int, ...]  #: Shape of one sample, without the batch dimension.
    #: Metadata in the file: the recipe, and the meaning of inputs and outputs.
    metadata: Mapping[str, Any]


def export(
    run: str | Path,
    to: str,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    checkpoint: str = "last",
    *,
    preset: str | None = None,
) -> Exported:
    """Export a trained model to one file that computes in fp32, and check the file's outputs.

    Args:
        run: A run folder, or with `preset` a file of weights from elsewhere.
        out: Path of the file. Default: `model` with the format's extension, in the run folder.
        preset: For a file of weights: the recipe, preset or YAML file of its model.

    Returns:
        The file that was written.

    Raises:
        SamebitsError: The model cannot be exported, or the outputs differ. An existing file is then left unchanged.
    """
    if to not in ENDINGS:
        raise ConfigError(
            f"a model can't be exported to {to!r}",
            allowed=", ".join(ENDINGS),
            fix="Name one of these formats.",
        )
    if to == "onnx":
        require("onnx", "--to onnx")
    path = Path(run)
    out = (
        Path(out)
        if out is not None
        else (path if path.is_dir() else path.parent) / f"model{ENDINGS[to]}"
    )
    if out.resolve() == path.resolve():
        raise ConfigError(f"--out {out} is the file of weights itself", fix="Give another name.")
    # Late, so that a wrong format or name is reported before torch is loaded.
    from samebits.engine.build import input_shape
    from samebits.storage.run_folder import check_target, is_export

    check_target(out, is_export)
    sweep_partials(out.parent, out.name)
    from samebits.cluster.world import alone

    settings = [*overrides, "precision=fp32", "loss_scale=dynamic", "device=cpu", "kernels=auto"]
    trained = TrainedModel(path, settings, checkpoint, preset)
    found, config = trained.settings()
    trained.check_unused()
    parts, model = trained.open(found, config, alone("cpu"))
    shape = input_shape(parts, config)
    metadata = {
        "samebits": __version__,
        "recipe": config.recipe,
        "input": list(shape),
        **parts.metadata,
    }
    return _write(to, model, shape, metadata, out)


def _write(
    to: str, model: nn.Module, shape: tuple[int, ...], metadata: Mapping[str, Any], out: Path
) -> Exported:
    import torch

    # Of its own: the global generator of a user's program stays as it is.
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(num, *shape, generator=generator) for num in BATCHES]
    write, read = {
        "safetensors": (_to_safetensors, _from_safetensors),
        "onnx": (_to_onnx, _from_onnx),
        "torch-export": (_to_program, _from_program),
    }[to]
    partial = partial_path(out)
    try:
        # The warnings of torch's exporters are about their internals; the outputs are checked below.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = write(model, samples[0], metadata)
        expected = [*map(_run_of(model), samples)]
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        run = read(partial, model)
        differences = [
            _difference(mine, run(batch)) for mine, batch in zip(expected, samples, strict=True)
        ]
        # torch's maximum: Python's would ignore NaN.
        difference = float(torch.tensor(differences, dtype=torch.float64).max())
        # `not <=`: a NaN is refused too.
        if not difference <= TOLERANCE[to]:
            raise CheckpointError(
                f"{out} was not written: its outputs are not the model's own",
                given=f"a difference of {difference:.2g} of the largest output",
                allowed=f"{TOLERANCE[to]:.2g} at most",
                fix="Report it with this command, or export to another format: "
                + ", ".join(ENDINGS),
            )
        partial.replace(out)
    except OSError as error:
        raise cannot_write_result(out, error) from None
    finally:
        partial.unlink(missing_ok=True)
    return Exported(out, len(content), difference, TOLERANCE[to], shape, metadata)


def _to_safetensors(model: nn.Module, inputs: Tensor, metadata: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    # Clones: safetensors refuses tensors that share memory, such as tied weights.
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    return save(state, metadata={"format": "pt", **_as_text(metadata)})


def _from_safetensors(path: Path, model: nn.Module) -> Run:
    from samebits.storage.weights import load_into, read

    other = copy.deepcopy(model)
    for tensor in other.state_dict().values():
        tensor.zero_()  # so that the weights can only come from the file
    load_into(other, read(path), path)
    return _run_of(other)


def _to_program(model: nn.Module, inputs: Tensor, metadata: Mapping[str, Any]) -> bytes:
    import torch

    program = _traced(model, inputs)
    stream = io.BytesIO()
    torch.export.save(program, stream, extra_files={FIELD: json_text(metadata).decode()})
    return stream.getvalue()


def _from_program(path: Path, model: nn.Module) -> Run:
    import torch

    return _run_of(torch.export.load(io.BytesIO(path.read_bytes())).module())


def _run_of(module: nn.Module) -> Run:
    import torch

    def run(batch: Tensor) -> list[Tensor]:
        with torch.inference_mode():
            return _flat(module(batch))

    return run


def _to_onnx(model: nn.Module, inputs: Tensor, metadata: Mapping[str, Any]) -> bytes:
    import torch

    program = _traced(model, inputs)
    num_outputs = len(_run_of(model)(inputs))
    names = [OUTPUT] if num_outputs == 1 else [f"{OUTPUT}{number}" for number in range(num_outputs)]
    try:
        onnx: Any = torch.onnx.export(
            program,
            (),
            input_names=[INPUT],
            output_names=names,
            dynamic_shapes=({0: BATCH},),  # names the dimension: a traced program has lost its name
            dynamo=True,
            verbose=False,
        )
    except Exception as error:  # torch raises many types
        raise _cannot_export("onnx", "--to torch-export or safetensors", error) from error
    onnx.model.metadata_props.update(_as_text(metadata))
    content: bytes = onnx.model_proto.SerializeToString()
    return content


def _from_onnx(path: Path, model: nn.Module) -> Run:
    import onnxruntime
    import torch

    def failed(error: Exception) -> ConfigError:
        return ConfigError(
            "onnxruntime can't run the file that torch.onnx has made of this model",
            given=f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}",
            cause=str(error).splitlines()[0][:200],
            fix="Use newer versions of torch and onnxruntime; or export --to torch-export or safetensors",
        )

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise failed(error) from error

    def run(batch: Tensor) -> list[Tensor]:
        try:
            return [torch.from_numpy(value) for value in session.run(None, {INPUT: batch.numpy()})]
        except Exception as error:
            raise failed(error) from error

    return run


def _traced(model: nn.Module, inputs: Tensor) -> Any:
    """Trace the model into one program with a dynamic batch dimension.

    Raises:
        ConfigError: The model cannot be traced.
    """
    import torch

    batch = torch.export.Dim(BATCH, min=1)
    try:
        return torch.export.export(model, (inputs.contiguous(),), dynamic_shapes=({0: batch},))
    except Exception as error:  # torch raises many types
        raise _cannot_export("export", "--to safetensors", error) from error


def _cannot_export(tool: str, other: str, error: Exception) -> ConfigError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ConfigError(
        f"torch.{tool} can't take this model: {first}",
        fix=f"{other}; or SAMEBITS_DEBUG=1 for the rest",
    )


def _flat(outputs: Any) -> list[Tensor]:
    from torch import Tensor

    # The rules of torch.export, which flattens the outputs in the same way.
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the largest difference as a share of the largest output; infinite if counts or shapes differ."""
    import torch

    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
        return math.inf
    ours, theirs = (
        torch.cat([tensor.double().flatten() for tensor in each]) for each in (expected, actual)
    )
    return float((ours - theirs).abs().max() / (ours.abs().max() or 1.0))


def _as_text(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata as strings, which is all that these formats hold: other values are written as JSON."""
    return {
        name: printable(value) if isinstance(value, str) else json_text(value).decode()
        for name, value in metadata.items()
    }
