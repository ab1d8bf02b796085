"""Invalid search spaces: their errors come before any code runs."""

from typing import Any

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.flows.plans.sweep import SweepParameters
from rlm_batch.flows.search.space import Choices, Range, infer_space, parse_space

SPACE = {"x": {"low": 0.0, "high": 1.0}}
SEARCH: dict[str, Any] = {"code": "report(x, 0)\nSUBMIT(y=x)", "space": SPACE, "trials": 3, "objective": "y"}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ([{}], "the space is empty"),
        ({"x": 3}, "the space of 'x' is 3: give a list of choices, or a dict with low and high"),
        ({"x": []}, "the space of 'x' is "),
        ({"x": {"low": 1, "high": 0.1}}, "the space of 'x': .*low <= high"),
        ({"x": {"low": 0, "high": 1, "log": True}}, "the space of 'x': .*low.*log"),
        ({"x": {"low": 1, "hihg": 2}}, "the space of 'x': `high` is missing; `hihg"),
        ({"x": {"low": "a", "high": 2}}, "the space of 'x': `low` is 'a'"),
        ({"x": {"low": float("nan"), "high": 2}}, "the space of 'x': `low` is nan"),
        ({"x": {"low": 1, "high": 9, "step": 0}}, "the space of 'x': .*step"),
        ({"x": {"low": 1, "high": 9, "step": 2, "log": True}}, "the space of 'x': .*step.*log"),
        ({"x": {"low": 1.5, "high": 9, "type": "int"}}, "the space of 'x': `low` is 1.5: it should be a valid integer"),
        ({"x y": [1]}, "a name that Python code cannot use"),
        ({"SUBMIT": [1]}, "'SUBMIT' has the name of a function"),
        ({"x": (0.0, 1.0)}, r"is the tuple \(0.0, 1.0\), which could be bounds or choices"),
    ],
)
def test_an_invalid_space_is_refused(space: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SweepParameters.parse({**SEARCH, "space": space}).make_plan()


def test_a_range_is_integer_if_its_bounds_are_or_on_request() -> None:
    (space,) = parse_space(
        {
            "units": {"low": 16, "high": 64, "step": 16},
            "share": {"low": 0, "high": 1.0},
            "rate": {"low": 1, "high": 2, "type": "float"},
            "opt": {"choices": ["adam", ["sgd", 0.9]]},
        }
    ).alternatives
    assert space["units"] == Range(16, 64, log=False, step=16, is_whole=True)
    assert space["share"] == Range(0, 1.0, log=False, step=None, is_whole=False)
    assert space["rate"] == Range(1, 2, log=False, step=None, is_whole=False)
    assert space["opt"] == Choices(("adam", ["sgd", 0.9]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trials": None}, "`space` needs `trials`: pass both"),
        ({"trials": 10**9}, "`trials` is 1000000000: it should be less than or equal to 100000"),
        ({"sampler": "best"}, r"the sampler best cannot be imported \(.*\): use random or tpe, or an import path"),
        ({"sampler": "nosuch.module:Sampler"}, "cannot be imported"),
        ({"sampler": "optuna.pruners:MedianPruner"}, "cannot be used"),
        ({"objective": None}, "a search needs an objective"),
        ({"objective": None, "sampler": "random", "pruner": "asha"}, "a search needs an objective"),
        ({"objective": ["y", "z"], "direction": ["minimize"]}, "2 objectives and 1 directions"),
        ({"objective": ""}, "`objective` is ''"),
        ({"pruner": "sharp"}, "`pruner` is 'sharp'"),
        ({"pruner": "asha", "objective": ["y", "z"]}, "need exactly one"),
        ({"pruner": "asha", "repeats": 2}, "`pruner` and `repeats` exclude each other"),
        ({"shards": 2}, "`shards` share no results of trials"),
        ({"shards": 2, "sampler": "random", "pruner": "asha"}, "`shards` share no results of trials"),
        ({"start": [{"x": 11}]}, "point 1 is {'x': 11}, which is not in the space"),
        ({"trials": 1, "start": [{"x": 0.1}, {"x": 0.2}]}, "`start` has 2 points and `trials` is 1"),
        ({"space": {"report": [1]}, "pruner": "asha"}, "'report' would hide the function"),
        ({"space": None, "grid": {"x": [1]}}, "`trials` needs `space`"),
        ({"grid": {"x": [1]}}, "pass one of `grid`, `points` or `space`, and only one"),
    ],
)
def test_an_impossible_search_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SweepParameters.parse({**SEARCH, **more}).make_plan()


def test_a_deployments_run_imports_only_optunas_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "of a worker")
    with pytest.raises(ConfigurationError, match="runs of deployments may only import Optuna's own"):
        SweepParameters.parse({**SEARCH, "sampler": "os:system"}).make_plan()
    SweepParameters.parse({**SEARCH, "sampler": "optuna.samplers:QMCSampler"}).make_plan()


def test_a_missing_optuna_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rlm-batch\[search\]'"):
        SweepParameters.parse(SEARCH).make_plan()


def test_a_missing_space_is_inferred_from_the_points() -> None:
    space = infer_space([{"x": 1, "opt": "a"}, {"x": 4, "opt": "b"}, {"x": 2.5, "opt": "a"}])
    assert space.alternatives == ({"x": Range(1, 4, log=False, step=None, is_whole=False), "opt": Choices(("a", "b"))},)
    assert space.find_alternative({"x": 3, "opt": "b"}) == 0
    assert space.find_alternative({"x": 5, "opt": "b"}) is None


def test_a_space_says_how_it_was_read() -> None:
    space = parse_space(
        {
            "lr": {"low": 1e-5, "high": 0.1, "log": True},
            "units": {"low": 32, "high": 512, "step": 32},
            "share": {"low": 0, "high": 1},
            "depth": {"low": 0, "high": 1, "type": "int"},
            "opt": ["adam", True],
        }
    )
    assert space.describe() == [
        "lr: real, 1e-05 to 0.1, log",
        "units: integer, 32 to 512, step 32",
        "share: integer, 0 to 1",
        "depth: integer, 0 to 1",
        'opt: choice of "adam", true',
    ]
