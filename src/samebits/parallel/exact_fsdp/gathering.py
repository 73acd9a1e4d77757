"""When the units of a sharded model are gathered and freed, by hooks of its blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from samebits.parallel.exact_fsdp.unit import ShardUnit


class GatheredUnits:
    """The units of a model: those of its blocks, in order, then what is outside of all blocks, if anything."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], units: Sequence[ShardUnit]) -> None:
        self.units, self.num_blocks, self._is_in_backward = units, len(blocks), False
        for number, block in enumerate(blocks):
            self._add_hooks(number, block)
        model.register_forward_pre_hook(self._begin_forward)
        model.register_forward_hook(self._end_forward)

    def begin_backward(self) -> None:
        """Note that a backward pass begins: blocks whose forward runs again in it stay gathered."""
        self._is_in_backward = True

    def end_pass(self) -> None:
        """Free all that is gathered. Called on all ranks."""
        self._is_in_backward = False
        for unit in self.units:
            unit.free()

    def _add_hooks(self, number: int, block: nn.Module) -> None:
        def gather(neighbor: int) -> None:
            self.units[number].gather()
            if 0 <= neighbor < self.num_blocks:
                self.units[neighbor].start_gather()  # while this block computes

        def before_forward(*_: Any) -> None:
            gather(number - 1 if self._is_in_backward else number + 1)

        def before_backward(_: Tensor) -> None:
            gather(number - 1)

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                # Outputs may be nested; torch has no public module for that.
                for each in tree_leaves(output):
                    if isinstance(each, Tensor) and each.requires_grad:
                        each.register_hook(before_backward)
            # The last block stays gathered, since the backward pass begins there.
            is_needed_next = torch.is_grad_enabled() and number + 1 == self.num_blocks
            if not self._is_in_backward and not is_needed_next:
                self.units[number].free()

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)

    def _begin_forward(self, *_: Any) -> None:
        for unit in self.units[self.num_blocks :]:
            unit.gather()

    def _end_forward(self, *_: Any) -> None:
        # No backward pass follows, at whose end everything is freed.
        if not torch.is_grad_enabled():
            self.end_pass()
