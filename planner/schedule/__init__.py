"""From decisions to exact moves: which blocks must leave in addition, and when each copy begins."""

from planner.schedule.block_exchange import Breadth, block_exchanges
from planner.schedule.moves import evict_furthest, on_demand, prefetch_from, prune, schedule
from planner.schedule.replayed import ReplayedPlan, StageClock
from planner.schedule.variants import tier_exchanges, update_exchanges, user_code_proposals
