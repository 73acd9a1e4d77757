"""The compiled model in training (`compile=true`), by torch.compile.

The compiled code must follow from the settings alone, not from the shapes that this process has seen before: those
depend on the world and on resumes. Therefore each shape is compiled separately (by default, torch compiles one program
for all sizes after it has seen two), and too many shapes end the run (by default, torch continues uncompiled).

Evaluation, eval and predict call the uncompiled model. They report the same metrics, and see shapes for which
compilation would take longer than it saves.
"""

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

from samebits.cluster.activity import Activity
from samebits.errors import ConfigError

MAX_SHAPES = 64
COMPILING = "compiling the model"
BEAT_S = 1.0


class Compiled:
    """A model's compiled forward and backward pass, on its device. The model itself is unchanged.

    Raises:
        ConfigError: This machine has no compiler.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        if device.type == "cpu":
            _check_compiler()
            # While it assembles the compiler's flags, it warns about a missing GPU.
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        # torch.compile has no arguments for these limits.
        config: Any = torch._dynamo.config
        config.recompile_limit = MAX_SHAPES
        config.fail_on_recompile_limit_hit = True
        self._run = torch.compile(model, dynamic=False)
        self.seconds = 0.0  #: Time that torch has spent compiling so far, within `watched`.

    def __call__(self, inputs: Any) -> Any:
        """Call the compiled model.

        Raises:
            ConfigError: torch cannot compile the model, or it was called with too many shapes.
        """
        try:
            return self._run(inputs)
        except FailOnRecompileLimitHit:
            raise ConfigError(
                f"compile=true: micro-batches had more than {MAX_SHAPES} shapes, and each one is compiled separately",
                fix="Set compile=false, or let the data have fewer sizes.",
            ) from None
        except TorchDynamoException as error:
            first = next(
                (line for line in str(error).splitlines() if line.strip()), type(error).__name__
            )
            raise ConfigError(
                f"compile=true: torch can't compile this model: {first}", fix="Set compile=false."
            ) from error

    @contextmanager
    def watched(self, activity: Activity) -> Iterator[None]:
        """Measure the compile time, and beat for the watchdog meanwhile: compiling may exceed the hang timeout."""
        over = threading.Event()
        started = 0.0
        beating: list[threading.Thread] = []

        def beat() -> None:
            while not over.wait(BEAT_S):
                activity.enter(COMPILING)

        def start(_: object) -> None:
            nonlocal started
            started = time.perf_counter()
            over.clear()
            beating.append(threading.Thread(target=beat, name="compiling", daemon=True))
            beating[-1].start()

        def end(_: object) -> None:
            self.seconds += time.perf_counter() - started
            stop()

        def stop() -> None:
            over.set()
            while beating:
                beating.pop().join()  # a beat after the end would count as training

        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            stop()
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)


def _check_compiler() -> None:
    # Asked before training: otherwise the first step fails, in the words of the compiler.
    # Private: torch has no public way to ask for it.
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        raise ConfigError(
            "compile=true needs a C++ compiler, and this machine has none",
            given=f"CXX={os.environ.get('CXX', 'g++')}",
            fix="Install g++, set CXX to a compiler, or set compile=false.",
        ) from None
