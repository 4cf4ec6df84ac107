"""Plans in a training run: made in the background, followed, corrected."""

from teraio.planning.background import BackgroundPlanner
from teraio.planning.follower import PlanFollower
from teraio.planning.given import fit_given_plan
from teraio.planning.job import PlanningJob, StartJob
from teraio.planning.saving import save

__all__ = [
    "BackgroundPlanner",
    "PlanFollower",
    "PlanningJob",
    "StartJob",
    "fit_given_plan",
    "save",
]
