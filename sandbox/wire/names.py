"""Names and limits that both ends of the wire know."""

from __future__ import annotations

QUERY_NAMES = ("llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched")
QUERY_ERROR_NAMES = ("QueryError", "BudgetExceeded", "DepthExceeded", "DeadlineExceeded")
VOLUME_NAMES = ("VOLUME", "save_to_volume", "load_from_volume", "list_volume")  # that code finds, asked for or not
OWN_FILE_PREFIX = ".rlm-batch"  # how the names of what we put on a volume begin; lists leave it out
CODE_FILE_PREFIX = f"{OWN_FILE_PREFIX}-code-"  # of files of code; the id of the process that runs it follows
MAX_REPORTED_FILES = 1000  # names of files on the volume that one execution reports
MAX_PROMPTS = 10_000  # that one query asks; each is a call of a model, and a record
COMMIT_TIMEOUT_SECONDS = 120.0  # for the command that commits the volume
DRIVER_FILE_PREFIX = "<driver>/"  # how the file names of the driver's code begin, in tracebacks
