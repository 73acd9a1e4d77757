"""Which ranks train which sites: contiguous by rank, so that few messages leave a machine.

    2 sites, 5 ranks      site 0: ranks 0 1 2     site 1: ranks 3 4       ranks of a site share its micro-batches
    4 sites, 3 ranks      rank 0: sites 0 1       rank 1: site 2          a rank trains its sites one after another
                          rank 2: site 3

In both cases ranks and sites are divided into as many groups as possible, each with its own ranks and sites. The first
rank of a group, its leader, exchanges the sums of the group's sites with the other leaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from samebits.cluster.world import World
from samebits.data.micro_batches import even_shares
from samebits.data.order import Place
from samebits.parallel.exchange.tree_all_reduce import Message, Work, post


@dataclass(frozen=True)
class SitePlacement:
    """The sites of a rank, and the ranks that it shares them with.

    Attributes:
        sites: Sites [first, last) of each group.
        ranks: Ranks [first, last) of each group.
        group: The rank's group.
    """

    sites: tuple[tuple[int, int], ...]
    ranks: tuple[tuple[int, int], ...]
    group: int

    @property
    def own_sites(self) -> range:
        """The sites that the rank trains."""
        return range(*self.sites[self.group])

    @property
    def own_ranks(self) -> range:
        """The ranks that train them."""
        return range(*self.ranks[self.group])

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each group."""
        return tuple(first for first, _ in self.ranks)


def place_sites(place: Place, num_sites: int) -> SitePlacement:
    """Return the placement of a rank.

    Args:
        place: The rank, and the number of ranks.
        num_sites: Number of sites.
    """
    num_groups = min(place.size, num_sites)
    ranks = even_shares(place.size, num_groups)
    group = next(number for number, (_, last) in enumerate(ranks) if place.rank < last)
    return SitePlacement(even_shares(num_sites, num_groups), ranks, group)


@dataclass(frozen=True)
class SubWorld(World):
    """Some ranks of a world, for messages between them. It has no collectives.

    Attributes:
        ranks: The ranks in the whole world.
    """

    ranks: tuple[int, ...] = ()


def sub_world(world: World, ranks: Sequence[int]) -> SubWorld:
    """Return the part of a world that has these ranks, this process's among them."""
    values = {each.name: getattr(world, each.name) for each in fields(World)}
    return SubWorld(**values | {"rank": ranks.index(world.rank), "size": len(ranks)}, ranks=tuple(ranks))


@post.register
def _(world: SubWorld, messages: Sequence[Message]) -> Sequence[Work]:
    return post.dispatch(World)(world, [each._replace(peer=world.ranks[each.peer]) for each in messages])
