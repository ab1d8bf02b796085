"""An agent whose code looks things up with a function of the host's."""

from rlm_batch import CodeError, LocalInterpreter

PRICES = {"tea": 3.5, "coffee": 4.0}
asked: list[str] = []


def look_up_price(name: str) -> float:
    asked.append(name)
    return PRICES[name]


with LocalInterpreter(tools={"look_up_price": look_up_price}) as interpreter:
    total = interpreter.execute("SUBMIT(total=sum(look_up_price(name) for name in basket))", {"basket": list(PRICES)})
    assert total.total == 7.5
    assert asked == ["tea", "coffee"]
    try:
        interpreter.execute("look_up_price('milk')")
    except CodeError as error:
        print(error)
        assert (error.type, error.message) == ("KeyError", "'milk'")
    assert interpreter.execute("SUBMIT(x=1)").x == 1, "and the session goes on"
