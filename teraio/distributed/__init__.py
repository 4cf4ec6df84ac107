"""What other ranks and PyTorch's parallel libraries have to do with parameters and gradients."""

from teraio.distributed.group_stages import GroupStages
from teraio.distributed.library_calls import LibraryCalls
from teraio.distributed.ranks import is_sharded_over_all, optimizer_inside, rank_count, refuse_overlapping
from teraio.distributed.replicated import GradientBuckets
from teraio.distributed.sharded import ShardedParameters
from teraio.distributed.update_broadcasts import UpdateBroadcasts

__all__ = [
    "GradientBuckets",
    "GroupStages",
    "LibraryCalls",
    "ShardedParameters",
    "UpdateBroadcasts",
    "is_sharded_over_all",
    "optimizer_inside",
    "rank_count",
    "refuse_overlapping",
]
