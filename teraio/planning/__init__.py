"""Make plans in the background of a training run, once for all equal ranks, and keep them for later starts."""

from teraio.planning.background import BackgroundPlanner, PlanningJob, StartJob
from teraio.planning.plan_cache import PlanCache, WarmStart, fit_given_plan, save
