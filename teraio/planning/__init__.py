"""Plans in a training run: made in the background, followed, corrected."""

from teraio.planning.background import BackgroundPlanner
from teraio.planning.follower import PlanFollower
from teraio.planning.given import fit_given_plan
from teraio.planning.job import PlanningJob, StartJob
from teraio.planning.plan_cache import PlanCache
from teraio.planning.saving import save
from teraio.planning.warm_start import WarmStart

__all__ = [
    "BackgroundPlanner",
    "PlanCache",
    "PlanFollower",
    "PlanningJob",
    "StartJob",
    "WarmStart",
    "fit_given_plan",
    "save",
]
