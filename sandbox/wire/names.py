"""Names and limits that the host and the driver share."""

from __future__ import annotations

QUERY_NAMES = ("llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched")
QUERY_ERROR_NAMES = ("QueryError", "BudgetExceeded", "DepthExceeded", "DeadlineExceeded")
VOLUME_NAMES = ("VOLUME", "save_to_volume", "load_from_volume", "list_volume")  # always defined for code
OWN_FILE_PREFIX = ".rlm-batch"  # prefix of our own files on a volume; listings leave them out
CODE_FILE_PREFIX = "rlm_batch_code_"  # prefix of code files, which code can import; the process's id follows
MAX_REPORTED_FILES = 1000  # names of volume files that one execution reports
MAX_PROMPTS = 10_000  # prompts per query; each is a model call and a record
COMMIT_TIMEOUT_SECONDS = 120.0  # time limit of the command that commits the volume
DRIVER_FILE_PREFIX = "<driver>/"  # prefix of the driver's file names in tracebacks


def add_article(noun: str) -> str:
    """Return a type's name after "a" or "an"."""
    return f"an {noun}" if noun.startswith((*"aeioAEIO", "nd")) else f"a {noun}"  # "nd" as in ndarray
