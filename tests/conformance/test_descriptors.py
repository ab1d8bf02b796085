"""Tests that code which reads and writes every descriptor disturbs no other execution."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import CodeError, Result, SubmitError
from rlm_batch.sandbox.errors import RlmBatchError
from rlm_batch.sandbox.interpreter import Interpreter

from .gate import Gate

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]


async def test_stdin_is_empty(interpreter: Interpreter) -> None:
    code = """
        import os, subprocess, sys
        try:
            input("name? ")
        except EOFError:
            SUBMIT(read=sys.stdin.read(), raw=os.read(0, 10).decode(), line=sys.stdin.readline(),
                   sub=subprocess.run(["cat"], capture_output=True).stdout.decode())
        """
    for context in (None, "c"):
        result = await interpreter.execute(dedent(code), context=context)
        assert result.outputs == {"read": "", "raw": "", "line": "", "sub": ""}


RUBBISH = ["x", "rubbish\n", "\n", "{}\n", "[]\n", '{"op":"end"}\n', '{"body":-1}\n', '{"body":5}\n', "\0" * 9999]
RUBBISH += ['{"op":"submit","token":"","body":9999999999}\n', '{"op":["end"],"body":2}\n{}\n', "1" * 200_000]
WRITING = """
    import os
    for fd in range(1024):
        try:
            os.write(fd, rubbish.encode())
        except OSError:
            pass
    SUBMIT(wrote=True)
    """
READING = """
    import os
    seen = []
    for fd in [0, *range(3, 1024)]:
        try:
            os.set_blocking(fd, False)
            seen.append(os.read(fd, 100000).decode("latin-1"))
        except OSError:
            pass
    SUBMIT(seen="".join(seen))
    """


async def test_misusing_descriptors_ends_at_most_its_own_execution(interpreter: Interpreter) -> None:
    interpreter.tools["wait"] = gate = Gate()
    await interpreter.execute("kept = 1", context="kept")
    others = [
        asyncio.ensure_future(interpreter.execute("wait(); SUBMIT(i)", {"i": i}, context=None if i else "c"))
        for i in range(4)
    ]
    await gate.is_reached.wait()
    writers = [interpreter.execute(dedent(WRITING), {"rubbish": text}) for text in RUBBISH]
    for text, outcome in zip(RUBBISH, await asyncio.gather(*writers, return_exceptions=True), strict=True):
        if isinstance(outcome, Result):
            assert outcome.outputs == {"wrote": True}
        else:
            assert isinstance(outcome, CodeError), f"{text[:20]!r}: {outcome!r}"
            assert "descriptor" in str(outcome)
    with pytest.raises(CodeError, match="descriptor"):
        await interpreter.execute(dedent(WRITING), {"rubbish": "rubbish\n"}, context="d")
    with pytest.raises(CodeError):
        await interpreter.execute("import os; os.closerange(0, 1024); SUBMIT(x=1)")
    assert (await interpreter.execute(dedent(READING))).seen == ""
    gate.open()
    assert [(await other).output for other in others] == list(range(4))
    assert (await interpreter.execute("SUBMIT(kept=kept)", context="kept")).kept == 1


# This code reads the token of its own channel, and guesses from it the tokens of other executions. It sends frames for
# executions 0 to 29 with the guessed tokens.
FORGING = """
    import gc, json, os
    gc.unfreeze()
    own = next(thing.token for thing in gc.get_objects() if type(thing).__name__ == "Channel")
    tokens = {"", own.rstrip("0123456789")}
    tokens.update(own.rstrip("0123456789") + str(i) for i in range(30))
    tokens.discard(own)
    def frame(header, body):
        return json.dumps({**header, "body": len(body)}).encode() + b"\\n" + body + b"\\n"
    for _ in range(2):
        for i in range(30):
            for token in tokens:
                data = frame({"op": "submit", "id": i, "n": 10 ** 6 + i, "token": token}, b'{"forged":true}')
                data += frame({"op": "end", "id": i, "n": i, "token": token, "status": "finished"}, b"null")
                for fd in range(3, 20):
                    try:
                        os.write(fd, data)
                    except OSError:
                        pass
"""


async def test_code_cannot_forge_results_of_another_execution(interpreter: Interpreter) -> None:
    for context in (None, "c"):
        interpreter.tools["wait"] = gate = Gate()
        others = [
            asyncio.ensure_future(interpreter.execute("wait(); SUBMIT(i=i)", {"i": i}, context=context and f"c{i}"))
            for i in range(5)
        ]
        await gate.is_reached.wait()
        forgers = [interpreter.execute(dedent(FORGING), context=context and f"forger {i}") for i in range(2)]
        assert [forger.outputs for forger in await asyncio.gather(*forgers)] == [{}, {}]
        gate.open()
        assert [(await other).outputs for other in others] == [{"i": i} for i in range(5)]
        assert (await interpreter.execute("SUBMIT(i=7)")).outputs == {"i": 7}


# Code may use its own token. For all frames that code sends with this token, the host returns a result or an error.
SAYING = """
    import gc, json, os
    gc.unfreeze()
    channel = next(thing for thing in gc.get_objects() if type(thing).__name__ == "Channel")
    header = {**header, "token": channel.token, "body": len(body.encode())}
    os.write(4, json.dumps(header).encode() + b"\\n" + body.encode() + b"\\n")
    os._exit(0)
"""


async def test_a_frame_forged_for_the_same_execution_is_a_result_or_error(interpreter: Interpreter) -> None:
    bodies = ["[1, 2]", '"text"', "null", "NaN", '{"x": NaN}', "{", '{"x": 1e999}', '{"x": "\\ud800"}', "1" * 5000]
    bodies += ["[" * 100_000, '{"outputs": 1}', '{"kind": ["exit"], "exit_code": "x", "line": {}, "traceback": [3]}']
    bodies += ['{"kind": "exit", "exit_code": 1e400}', '{"type": {}, "message": null, "line": true}']
    bodies += [f'{{"{name}": ' + "[" * 900 + "]" * 900 + "}" for name in ("traceback", "message", "x")]
    headers = [{"op": "submit"}, {"op": "end", "status": "error"}, {"op": "end", "status": "finished"}]
    headers += [{"op": "end", "status": "setup"}, {"op": "end", "status": "lost"}, {"op": "end", "status": 5}]
    headers += [{"op": "call", "call": 1, "name": "no such tool"}, {"op": "call", "call": "1", "name": ["x"]}]
    for header in headers:
        is_usual = header["op"] == "submit" or header.get("status") == "error"
        for body in bodies if is_usual else bodies[::6]:
            variables = {"header": header, "body": body}
            try:
                result = await interpreter.execute(dedent(SAYING), variables)
            except RlmBatchError as error:
                assert str(error).encode(), variables  # noqa: PT017 - either outcome is right
                kinds = (CodeError, SubmitError) if header["op"] == "submit" else CodeError
                assert isinstance(error, kinds) or header["op"] == "end", (variables, error)  # noqa: PT017
            else:
                assert isinstance(result.outputs, dict), variables
                assert repr(result.outputs).encode(), variables
                assert "\\ud800" not in repr(result.outputs), "a text that no file can hold"
    assert (await interpreter.execute("SUBMIT(fine=1)")).fine


REFUSED = {
    "not the fields": ['{"y": 1}', '{"x": 1, "y": 1}', "{}", '{"x": 1.5}', '{"x": true}', '{"x": null}'],
    "not json": [
        "[1, 2]", "[]", '[{"x": 1}]', '[{"x": 1}, {}, {}]', "null", "5 ", '{"x": 1', '{"x": 1}{}', '{"x": "\\ud800"}',
        f'{{"x": {"1" * 5000}}}',
    ],
    "not finite": [
        f'{{"x": {x}}}' for x in ("1e999", "-1e999", '[1, {"y": 2e308}]', "9" * 400 + ".0", "NaN", "Infinity")
    ],
    "no number where one is said to be": [
        f'[{{"x": [1, null]}}, {{{name}}}]'
        for name in (
            '"/x/0": "nan"', '"/x/2": "nan"', '"/x/-1": "nan"', '"/y": "inf"', '"": "nan"', '"x/1": "nan"',
            '"/x/1": "NaN"', '"/x/1": 1', '"/x/1/0": "nan"', f'"{"/0" * 9000}": "nan"',
        )
    ],
    "too deep": [f'{{"x": {"[" * depth}{"]" * depth}}}' for depth in (101, 489, 900)],
}  # fmt: skip


async def test_an_invalid_result_written_without_submit_raises_submit_error(
    interpreter: Interpreter,
) -> None:
    code, header = dedent(SAYING), {"op": "submit"}
    for why, bodies in REFUSED.items():
        for body in bodies:
            fields = [{"name": "x", "type": "int"}] if why == "not the fields" else None
            with pytest.raises(SubmitError, match="invalid result past SUBMIT") as caught:
                await interpreter.execute(code, {"header": header, "body": body}, output_fields=fields)
            assert caught.value.meta is not None
            assert len(str(caught.value)) < 400, body
    for fields in (None, [{"name": "x", "type": "int"}]):
        result = await interpreter.execute(code, {"header": header, "body": '{"x": 1}'}, output_fields=fields)
        assert result.outputs == {"x": 1}
