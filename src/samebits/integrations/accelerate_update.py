"""The optimizers and schedulers that an `ExactAccelerator` prepares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from samebits.integrations.accelerate_settings import ExactPart


class ExactOptimizer(AcceleratedOptimizer):
    """An `AcceleratedOptimizer` that passes every call on: the exact loop decides when the optimizer acts."""

    def step(self, closure: Any = None) -> None:
        """Call `step` of the optimizer, through the GradScaler in fp16."""
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        self._has_acted = False
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the GradScaler has left out the last step, because a gradient overflowed."""
        return self.scaler is not None and self.gradient_state.sync_gradients and not self._has_acted

    def watch(self) -> None:
        """Note from now on when the optimizer acts."""
        self._has_acted = True
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "_has_acted", True))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Call `zero_grad` of the optimizer."""
        self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)


class ExactScheduler(AcceleratedScheduler):
    """An `AcceleratedScheduler` that acts once a step."""

    exact: ExactPart  #: The exact part of the accelerator.

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler where the optimizers act, or at once between epochs."""
        loop = self.exact.loop
        if loop is None:
            self._advance(*args, **kwargs)
        else:
            loop.after_update(lambda: self._advance(*args, **kwargs))

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        # Accelerate counts batches of the DataLoader's batch_size over all processes.
        for _ in range(self.exact.batches_per_step):
            # As in Accelerate's own scheduler: no step after the last one of OneCycleLR.
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                self.scheduler.step(*args, **kwargs)
