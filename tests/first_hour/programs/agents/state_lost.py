"""A session whose process was killed: the error says the way on, and it works."""

from rlm_batch import CodeCrashed, LocalInterpreter, StateLost

with LocalInterpreter() as interpreter:
    interpreter.execute("data = [1, 2, 3]")
    try:
        interpreter.execute("import os\nos._exit(9)")
    except CodeCrashed as error:
        print(error)
    try:
        interpreter.execute("SUBMIT(total=sum(data))")
    except StateLost as error:
        print(error)
        assert "reset()" in str(error)
    interpreter.reset()
    assert interpreter.execute("data = [1, 2]\nSUBMIT(total=sum(data))").total == 3
