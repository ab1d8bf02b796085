"""Recursive queries that run at the same time in one process."""

import ast
import threading
from typing import Any

import pytest
from pydantic import SecretStr

from rlm_batch import LanguageModel, LocalInterpreter

from ...infra.scripted_turns import make_script
from ...standins.openai_chat import ChatServer


def test_concurrent_queries_parse_no_python_in_their_threads(chat: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel threads of Python 3.11 that parse syntax trees sometimes fail."""
    parse = ast.parse
    parsed: list[str] = []

    def record_thread(source: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "rlm-batch-tool":
            parsed.append(source)
        return parse(source, *args, **options)

    chat.script = make_script(("", "SUBMIT(answer='well')"))
    model = LanguageModel(model="openai/gpt-4o-mini", api_key=SecretStr("sk-x"), api_base=chat.url)
    code = "SUBMIT(rlm_query_batched(['one', 'two']) + [rlm_query('three', context='a text')])"
    with LocalInterpreter(language_model=model, isolation="none", timeout=500) as interpreter:
        interpreter.execute("rlm_query('which has DSPy imported')")
        monkeypatch.setattr(ast, "parse", record_thread)
        assert interpreter.execute(code).output == ["well"] * 3
    assert parsed == []
