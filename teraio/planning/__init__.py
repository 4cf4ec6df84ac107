"""Plans in a training run: made in the background, followed, corrected."""

from teraio.planning.follower import PlanFollower
from teraio.planning.job import PlanningJob
from teraio.planning.saving import save

__all__ = [
    "PlanFollower",
    "PlanningJob",
    "save",
]
