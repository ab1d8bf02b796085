"""What the flows would refuse of their parameters and their files of inputs, said before they run."""

from importlib import import_module
from typing import Any

from ..blocks.storage.location_parsing import parse_scheme
from .inputs.host_paths import locate_ledger
from .inputs.readers import TypesOfColumns, resolve_types_of
from .inputs.tables import Report


def load_flow(name: str) -> Any:
    """The flow of that name, with all that it imports."""
    return getattr(import_module(f".{name}", __package__), name)


def open_flow_inputs(flow: str, parameters: dict[str, Any], report: Report | None = None) -> object:
    """The readers of the inputs, which the flow is handed again for as long as they are held.

    `report` is told how far a long file is read.

    None where a file is below a block: its block is on the server, which may not be there before, and the flow alone
    reads it. Raises ConfigurationError for what the flow would refuse.
    """
    files = [parameters.get(name) for name in ("inputs", "points", "chunks", "data")]
    if any(isinstance(file, str) and parse_scheme(file) == "block" for file in files):
        return None
    match flow:
        case "batch":
            return _open_batch_inputs(parameters, report)
        case "sweep":
            return _open_sweep_inputs(parameters, report)
        case "chunks":
            return _open_chunks_inputs(parameters, report)
        case "sequence":
            from .sequence import texts

            return texts(parameters["steps"])
        case "rlm":
            from .rlm import question

            names = ("query", "context", "context_file", "context_volume_path")
            return question(*(parameters[name] for name in names))
        case _:
            return None


def _open_batch_inputs(parameters: dict[str, Any], report: Report | None) -> object:
    from .batch import executions

    inputs = parameters["inputs"]
    return executions(parameters["code"], inputs, _resolve_types(inputs, parameters), report)


def _open_sweep_inputs(parameters: dict[str, Any], report: Report | None) -> object:
    from .search.plan import parse_objectives
    from .sweep import choose_points

    names = ("grid", "points", "space", "trials", "sampler", "seed", "pruner", "code")
    return choose_points(
        **{name: parameters[name] for name in names},
        objectives=parse_objectives(parameters["objective"], parameters["direction"]),
        prepare=parameters.get("prepare"),
        is_sharded=parameters.get("shards") is not None,
        types=_resolve_types(parameters["points"], parameters),
        report=report,
    )


def _open_chunks_inputs(parameters: dict[str, Any], report: Report | None) -> object:
    from .inputs.readers import build_chunks

    by_id, data = parameters["chunks"], parameters["data"]
    types = _resolve_types(by_id or data, parameters)
    return build_chunks(by_id, data, parameters["chunk_size"], types, report)


def _resolve_types(source: object, parameters: dict[str, Any]) -> TypesOfColumns:
    path = parameters.get("results_path")
    return resolve_types_of(source, parameters.get("types"), None if path is None else locate_ledger(path))
