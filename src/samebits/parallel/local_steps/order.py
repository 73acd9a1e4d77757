"""The order of samples with local steps: an outer step has a local step of each site for each of its global batches.

With sync.every=2, sync.sites=2, global_batch=8 and micro_batch=2:

    step (outer)             0                       | 1
    global batch             0           1           | 2           3
    micro-batch              0  1  2  3  4  5  6  7  | ...
    site                     0  0  1  1  0  0  1  1  |
    local step of the site   0  0  0  0  1  1  1  1  |

A site's share of a global batch is that of a rank in a world of as many ranks as there are sites. An outer step ends
with its epoch, so the last one of an epoch may have fewer local steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from samebits.data.micro_batches import part
from samebits.data.order import MicroBatch, Order, Place, Step
from samebits.parallel.local_steps.placement import place_sites


@dataclass(frozen=True, eq=False)
class OuterStep(Step):
    """One update of the weights that all sites share, with the local steps of one rank's sites.

    Its micro-batches are those of its local steps, in the order in which the rank runs them.

    Attributes:
        sites: Each site of this rank, with its local steps. A site without samples has a step without micro-batches.
    """

    sites: tuple[tuple[int, tuple[Step, ...]], ...] = ()


@dataclass(frozen=True)
class _Site:
    """A site as a rank of a world of sites."""

    rank: int
    size: int


@dataclass(frozen=True)
class LocalStepOrder(Order):
    """An `Order` whose steps are outer steps: `global_batch` has the samples of all of its local steps.

    Attributes:
        every: Local steps of each site in an outer step.
        num_sites: Number of sites.
    """

    every: int = 1
    num_sites: int = 1

    @cached_property
    def local(self) -> Order:
        """The order of the local steps, over all sites."""
        return Order(self.num_samples, self.global_batch // self.every, self.micro_batch, self.seed, self.groups)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Outer steps of one epoch, including a smaller last one."""
        return -(-self.local.steps_per_epoch // self.every)

    def num_local_steps(self, num_steps: int) -> int:
        """Return the number of local steps of a site in the first `num_steps` outer steps of a run."""
        epochs, steps = divmod(num_steps, self.steps_per_epoch)
        return epochs * self.local.steps_per_epoch + steps * self.every

    def steps(self, place: Place, *, start: int = 0, stop: int) -> Iterator[Step]:
        """Iterate over the outer steps [start, stop) of a run, each with the local steps of one rank's sites.

        Args:
            place: The rank and the world size.
            start: First outer step.
            stop: The outer step after the last one.
        """
        placement = place_sites(place, self.num_sites)
        first, last = self.num_local_steps(start), self.num_local_steps(stop)
        plans = [
            (site, self.local.steps(_Site(site, self.num_sites), start=first, stop=last))
            for site in placement.own_sites
        ]
        ranks = placement.own_ranks
        rank, num_ranks = ranks.index(place.rank), len(ranks)
        for number in range(start, stop):
            count = self.num_local_steps(number + 1) - self.num_local_steps(number)
            whole = [(site, [next(steps) for _ in range(count)]) for site, steps in plans]
            sites = tuple((site, tuple(_local_step(each, rank, num_ranks) for each in steps)) for site, steps in whole)
            yield OuterStep(
                number=number,
                epoch=number // self.steps_per_epoch,
                num_samples=sum(each.num_samples for each in whole[0][1]),
                num_micro_batches=sum(each.num_micro_batches for each in whole[0][1]),
                world_size=place.size,
                micro_batches=tuple(each for _, steps in sites for step in steps for each in step.micro_batches),
                sites=sites,
            )


def _local_step(step: Step, rank: int, num_ranks: int) -> Step:
    """Return a site's step, with the micro-batches of one of its ranks.

    Args:
        step: The global batch, with all micro-batches of the site.
        rank: The rank among the site's ranks.
        num_ranks: Number of ranks of the site.
    """
    of_site = step.micro_batches
    num_samples = sum(map(len, of_site))

    def leaf(index: int) -> MicroBatch:
        # The seed of the forward pass stays that of the whole batch: sites draw other dropout masks.
        return replace(of_site[index], index=index, weight=len(of_site[index]) / num_samples)

    mine = range(*part(0, len(of_site), num_ranks, rank))
    return replace(
        step,
        num_samples=num_samples,
        num_micro_batches=len(of_site),
        world_size=num_ranks,
        micro_batches=tuple(map(leaf, mine)),
    )
