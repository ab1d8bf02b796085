"""The sweep flow: one piece of code over the points of a search space, and the best trial by an objective."""

from .plans.sweep import SweepParameters
from .prefect_flow import define_flow

sweep = define_flow(SweepParameters)
