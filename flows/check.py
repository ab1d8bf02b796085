"""The check flow: another check over the outcomes of an earlier run."""

from .plans.check import CheckParameters
from .prefect_flow import define_flow

check = define_flow(CheckParameters)
