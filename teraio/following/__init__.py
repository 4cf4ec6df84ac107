"""Follow a plan: where the iteration is in it, what it says there, and how far it is off."""

from teraio.following.observer import IterationObserver
from teraio.following.replanning import PlanInForce
from teraio.following.schedule import RerunsByStage, StageSchedule
