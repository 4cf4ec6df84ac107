"""What PyTorch's parallel libraries do with parameters and gradients: DDP, FSDP2, ZeroRedundancyOptimizer, tensor parallelism."""

from teraio.distributed.ddp import GradientBuckets, is_sharded_over_all, rank_count
from teraio.distributed.fsdp import ShardedParameters
from teraio.distributed.library_calls import LibraryCalls
from teraio.distributed.zero import UpdateBroadcasts, optimizer_inside, refuse_overlapping

__all__ = [
    "GradientBuckets",
    "LibraryCalls",
    "ShardedParameters",
    "UpdateBroadcasts",
    "is_sharded_over_all",
    "optimizer_inside",
    "rank_count",
    "refuse_overlapping",
]
