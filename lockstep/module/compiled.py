"""The model by torch.compile, in training (`compile=true`).

The code that torch makes has to follow from the settings alone: not from which micro-batches this process has met
before, which is another thing in another world or after a resume. So each shape is compiled for itself (torch would by
itself make one program for all sizes as soon as it has met two), and where shapes are too many, the run ends; torch
would go on uncompiled. Evaluation, eval and predict call the model itself: they give the same figures, and meet shapes
for which compiling would take longer than it saves.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from lockstep.cluster.activity import Activity
from lockstep.errors import ConfigError

MAX_SHAPES = 64
COMPILING = "compiling the model"
BEAT_S = 1.0


class Compiled:
    """A model's compiled forward pass; the backward pass comes with it. The model itself stays as it is.

    Args:
        model: On its device, in the precision that it computes in.
        device: Where it computes.

    Attributes:
        seconds: How long torch was compiling so far, while `watched`.

    Raises:
        ConfigError: There is nothing here that could compile.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        if device.type == "cpu":
            _check_compiler()
            # It warns of the GPU that is not there, as the compiler's flags are put together.
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        config: Any = torch._dynamo.config
        config.recompile_limit, config.fail_on_recompile_limit_hit = MAX_SHAPES, True
        self._run = torch.compile(model, dynamic=False)
        self.seconds = 0.0

    def __call__(self, inputs: Any) -> Any:
        """What the model gives.

        Raises:
            ConfigError: Torch can't compile it, or it was called with too many shapes.
        """
        try:
            return self._run(inputs)
        except FailOnRecompileLimitHit:
            raise ConfigError(
                f"compile=true: micro-batches came in more than {MAX_SHAPES} shapes, and each is compiled for itself",
                fix="compile=false; or let the data give fewer sizes",
            ) from None
        except TorchDynamoException as error:
            first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ConfigError(f"compile=true: torch can't compile this model: {first}", fix="compile=false") from error

    @contextmanager
    def watched(self, pulse: Activity) -> Iterator[None]:
        """Count the time that compiling takes, and let it be a sign of life: it may be longer than the hang timeout."""
        over = threading.Event()
        began = 0.0

        def beat() -> None:
            while not over.wait(BEAT_S):
                pulse.enter(COMPILING)

        def start(_: object) -> None:
            nonlocal began
            began = time.perf_counter()
            over.clear()
            threading.Thread(target=beat, name="compiling", daemon=True).start()

        def end(_: object) -> None:
            self.seconds += time.perf_counter() - began
            over.set()

        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            over.set()
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        raise ConfigError(
            "compile=true needs a C++ compiler, and there is none",
            looked_for=os.environ.get("CXX", "g++"),
            fix="install g++, name one in CXX, or set compile=false",
        ) from None
