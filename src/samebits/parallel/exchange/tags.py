"""Tags of the messages between two ranks. Messages of several buckets that are under way must differ in theirs.

Those of one bucket may not: messages with one tag arrive in the order in which they were posted (`two_level.py`).

     bit  31   30   29          16 15       6 5      0
         +----+----+--------------+----------+--------+
         | 0  | L  |  sum         |  bucket  |  part  |
         +----+----+--------------+----------+--------+
           |    |     |              |          node of the sender's tree, by its index; RESULT: a sum of ranks
           |    |     |              bucket of the sum; unit of a sharded model
           |    |     sum: 0 for the engine's and for the buffers of an own loop, else one of the own loop's sums
           |    layer: a sum within a forward or backward pass (synchronized batch norm)
           sign: gloo takes tags as unsigned, torch as signed ints

The engine has one sum, so a model with more than 1,024 buckets may use the bits of the sum as well.
"""

RESULT = 63  # follows the indices of nodes; a rank has at most one node per level of the tree, on either side
LAYER = 1 << 30
GATHER, REDUCE = 0, 1  # parts of a unit of a sharded model


def bucket_tag(bucket: int, sum_number: int = 0) -> int:
    """Return the tag of the first part of a bucket; add the part."""
    return (sum_number << 10 | bucket) << 6
