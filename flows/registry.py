"""The flows that execute code, one line each. The command line makes a command of each."""

from typing import Any

from .batch import BatchParameters
from .chunks import ChunksParameters
from .parameters import FlowParameters
from .rlm import RlmParameters
from .sequence import SequenceParameters
from .sweep import SweepParameters

MODELS: tuple[type[FlowParameters[Any]], ...] = (
    BatchParameters,
    SweepParameters,
    ChunksParameters,
    SequenceParameters,
    RlmParameters,
)
