"""The chunks flow: runs one piece of code on each chunk of the data, and another to reduce the results."""

from .plans.chunks import ChunksParameters
from .prefect_flow import define_flow

chunks = define_flow(ChunksParameters)
