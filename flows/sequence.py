"""The sequence flow: pieces of code that share one sandbox and its state, one after the other."""

from .plans.sequence import SequenceParameters
from .prefect_flow import define_flow

sequence = define_flow(SequenceParameters)
