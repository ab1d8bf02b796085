"""The entry point of the engine: it plans, checks, provides a server, enters Prefect, executes and reports."""

import asyncio
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect import Flow, State, get_run_logger
from prefect.exceptions import MissingResult
from prefect.logging import get_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH
from prefect.states import Completed

from ..blocks.language_model.model_access import LIMITS, is_saved_model, open_model_access
from ..sandbox.caller import name_parameter, use_flow
from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..tasks.ledger.result_index import get_results_root
from ..tasks.tracing import trace_flow_run
from .engine.context import resolve_provider_with_volume
from .engine.executor import Sharding
from .engine.failures import raise_failures
from .engine.job import execute_items, open_job
from .engine.run_outcome import with_reference
from .inputs.secrets import read_secrets
from .inputs.spilling import spill_long_parameters
from .listener import FlowListener
from .parameters import FlowParameters, find_contents
from .plan import Plan
from .prefect_client import open_clients
from .prefect_server import provide_server
from .reports import Report
from .run_state import RunState, get_run_state, use_run_state
from .sharding.coordinator import ShardingExecutor
from .sharding.work_pool import plan_shards, require_server_url

if TYPE_CHECKING:
    from .prefect_flow import BatchFlow


async def run(
    flow: "BatchFlow[..., Any]",
    parameters: FlowParameters[Any],
    listener: FlowListener | None = None,
    plan: Plan | None = None,
) -> Report:
    """Run a flow in this process, and return its report.

    Args:
        flow: The flow of the parameters' model.
        parameters: The checked parameters.
        listener: Receives the run's events.
        plan: The plan of these parameters, if the caller has made it.

    Raises:
        ConfigurationError: The parameters, the provider or the server cannot be used.
        ExecutionsFailed: Some executions failed, and `on_failure` is "raise".
    """
    state = RunState(plan=plan, listener=listener)
    await call_flow(flow, parameters, state)
    assert state.report is not None
    return state.report


async def call_flow(
    flow: "BatchFlow[..., Any]", parameters: FlowParameters[Any], state: RunState, **prefect_options: Any
) -> Any:
    """Plan and check a run, so that a wrong parameter starts no server, and then call the flow through Prefect."""
    state.parameters = parameters
    values = spill_long_parameters(parameters.list_values(), find_contents(type(parameters)))
    if state.plan is None and not parameters.reads_blocks():
        state.plan = parameters.make_plan(get_logger("rlm_batch").info)
    options = parameters.make_options() if state.plan is None else state.plan.options
    if options.secrets:
        read_secrets(options)
    if options.shards is not None:
        # Shards check the provider and the model on their own machines.
        require_server_url()
    elif state.plan is not None:
        await _check_before_start(state.plan, state)
    try:
        return await enter_prefect(flow, values, state, **prefect_options)
    except MissingResult:
        # A busy server answered late when Prefect set the run's last state. Prefect set the state again, and used the
        # server's copy, which has no result.
        if state.report is None:
            raise
        return state.report


async def _check_before_start(plan: Plan, state: RunState) -> None:
    """Check the provider and the model, unless they are blocks on the server. Raises ConfigurationError."""
    options = plan.options
    if "/" not in str(options.provider):
        state.provider = await resolve_provider_with_volume(options, plan.volume_name)
        await state.provider.check()
        state.environment = await state.provider.describe_sandboxes()
    if options.models and options.language_model is None:
        raise ConfigurationError(
            f"{name_parameter('models')} is set, and {name_parameter('language_model')} is not: set it to the model of "
            "queries that name none"
        )
    models = options.models.values() if isinstance(options.models, dict) else options.models or ()
    sources = (options.language_model, options.sub_model, *models)
    if options.language_model is not None and not any(is_saved_model(str(source)) for source in sources):
        limits = {name: getattr(options, name) for name in LIMITS}
        access = await open_model_access(options.language_model, **limits)
        await access.check_first_call(is_recursive=plan.recursion is not None)
        state.is_model_checked = True


async def enter_prefect(
    flow: "BatchFlow[..., Any]", values: dict[str, Any], state: RunState, **prefect_options: Any
) -> Any:
    """Call the flow through Prefect, on a shared or embedded server if no server is configured."""
    if flow.result_storage is None and flow.persist_result is False:
        # Prefect would ask the server for its default storage, with a request that blocks the event loop.
        flow = copy(flow)
        flow.result_storage = PREFECT_LOCAL_STORAGE_PATH.value()
    try:
        with use_run_state(state):
            async with provide_server(lambda: state.results_path, state.listener) as state.ui_url, open_clients():
                return await Flow.__call__(flow, **prefect_options, **values)  # type: ignore[misc]
    except RlmBatchError as error:
        raise error.with_traceback(None) from error.__cause__  # Prefect adds dozens of frames.
    except asyncio.CancelledError as error:
        raise error.with_traceback(None) from None


async def execute_flow(model: type[FlowParameters[Any]], values: dict[str, Any]) -> State[Any]:
    """Execute the current flow run, and return its state, whose message says how the run went.

    In a worker, this function parses the parameters and makes the plan. Otherwise the caller has done so.
    """
    state = get_run_state(flow_run.id)
    state.outcome = state.report = None  # Prefect may have retried the run.
    parameters = state.parameters or model.parse(values)
    plan = state.plan or parameters.make_plan(get_run_logger().info, get_results_root() / flow_run.id)
    try:
        with trace_flow_run(), use_flow(parameters.get_variables_source(), min(plan.options.max_workers, plan.total)):
            async with open_job(plan, state, await _find_sharding(plan)) as job:
                await (plan.execute or execute_items)(job)
                outcomes = job.collect_outcomes()
            if plan.options.on_failure == "raise":
                raise_failures(outcomes, plan.noun, plan.rerun_effect)
            state.report = parameters.build_report(outcomes)
    except Exception:
        if state.outcome is not None:
            state.outcome.emit("failed")
        raise
    assert state.outcome is not None
    state.outcome.emit("completed")
    result = await with_reference(state.report, state.outcome.record)
    return Completed(message=state.outcome.message, data=result)


async def _find_sharding(plan: Plan) -> Sharding | None:
    """Return the sharding of a job in shards, or None. Raises ConfigurationError if no shard can run."""
    if plan.options.shards is None:
        return None
    shard_plan = await plan_shards(plan.options.shards, plan.total, get_run_logger())
    make_executor = partial(ShardingExecutor, plan=shard_plan, noun=plan.report_spec.noun)
    return Sharding(shard_plan.description, make_executor)
