"""The rule by which a job that goes on reads its CSV file: as its earlier runs did, so that nothing is run again."""

from ...blocks.storage.location import Location, PathOrLocation
from ...sandbox.errors import ConfigurationError
from ...tasks.ledger.run_record import list_run_records
from .readers import RecordedTypes, TypesOfColumns


def resolve_types_of(source: object, types: TypesOfColumns, ledger: PathOrLocation | None) -> TypesOfColumns:
    """The types of the columns of `source`, if that is a CSV file's path: those that were given, else a ledger's.

    A ledger has those by which its last run read such a file.

    A run without them was one of a version that took each cell by itself, and is gone on with in the same way. None
    where there is no run yet: then they are found. Raises ConfigurationError.
    """
    is_csv = isinstance(source, str) and source.lower().endswith(".csv")
    if types is not None or ledger is None or not is_csv:
        return types
    try:
        records = list_run_records(ledger)
        has_parts = bool(_list_parts(ledger)) if not records else True
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"the results in {ledger} cannot be read: {error.strerror or error}") from None
    for record in reversed(records):
        if record.column_types is None:
            return "json"
        if isinstance(record.column_types, dict) and record.column_types:
            return RecordedTypes(record.column_types)
        if record.column_types:
            return "json"
    return "json" if has_parts and not records else None


def _list_parts(ledger: PathOrLocation) -> list[str]:
    if isinstance(ledger, Location):
        return list(ledger.list_sizes("part-*.jsonl"))
    return [path.name for path in ledger.glob("part-*.jsonl")]
