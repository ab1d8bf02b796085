"""The rlm flow: questions over long contexts, each answered by a recursive language model in a sandbox."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from .event_stream import EventStream
from .parameters import FlowParameters, Types
from .plans.rlm import Context, Inputs, Model, Queries, RlmOptions, RlmParameters
from .prefect_flow import BatchFlow, define_flow
from .rlm_answers import RlmAnswer, RlmAnswers

if TYPE_CHECKING:
    P1 = ParamSpec("P1")
    P2 = ParamSpec("P2")
    R1 = TypeVar("R1")
    R2 = TypeVar("R2")

    # The flow returns one answer or many, depending on its parameters. These models of the two calls are only for type
    # checkers. `RlmParameters` has the parameters of both.
    @dataclass(frozen=True)
    class OneQuestion(RlmOptions, FlowParameters[RlmAnswer]):
        query: str
        language_model: Model
        context: Context = ""

    @dataclass(frozen=True, kw_only=True)
    class ManyQuestions(RlmOptions, FlowParameters[RlmAnswers]):
        language_model: Model
        context: Context = ""
        queries: Queries = None
        inputs: Inputs = None
        types: Types = None

    class RlmFlow(BatchFlow[..., Any], Generic[P1, R1, P2, R2]):
        @overload  # type: ignore[override]
        def __call__(self, *args: P1.args, **kwargs: P1.kwargs) -> Coroutine[Any, Any, R1]: ...
        @overload
        def __call__(self, *args: P2.args, **kwargs: P2.kwargs) -> Coroutine[Any, Any, R2]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
        @overload  # type: ignore[override]
        def sync(self, *args: P1.args, **kwargs: P1.kwargs) -> R1: ...
        @overload
        def sync(self, *args: P2.args, **kwargs: P2.kwargs) -> R2: ...
        def sync(self, *args: Any, **kwargs: Any) -> Any: ...
        @overload  # type: ignore[override]
        def stream(self, *args: P1.args, **kwargs: P1.kwargs) -> EventStream[R1]: ...
        @overload
        def stream(self, *args: P2.args, **kwargs: P2.kwargs) -> EventStream[R2]: ...
        def stream(self, *args: Any, **kwargs: Any) -> Any: ...

    def define_both(
        one: Callable[P1, FlowParameters[R1]], many: Callable[P2, FlowParameters[R2]]
    ) -> RlmFlow[P1, R1, P2, R2]: ...

    rlm = define_both(OneQuestion, ManyQuestions)
else:
    rlm = define_flow(RlmParameters)
