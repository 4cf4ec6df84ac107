"""What PyTorch's parallel libraries do with parameters and gradients: DDP, FSDP2, ZeroRedundancyOptimizer, tensor parallelism."""

from teraio.distributed.ddp import (
    GradientBuckets,
    broadcast_in_stages,
    is_sharded_over_all,
    optimizer_inside,
    rank_count,
    refuse_overlapping,
)
from teraio.distributed.fsdp import ShardedParameters
from teraio.distributed.library_calls import LibraryCalls
