"""The batch flow: many pieces of code, or one piece over many inputs, each in a sandbox."""

from .plans.batch import BatchParameters
from .prefect_flow import define_flow

batch = define_flow(BatchParameters)
