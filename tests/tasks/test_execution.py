"""The key of an execution, which shows whether an earlier run has its result."""

from rlm_batch.tasks.execution import assign_keys

LOCAL = {"provider": "local"}


def make_keys(*items, fingerprint=LOCAL):
    return [execution.key for execution in assign_keys(items, fingerprint)]


def test_only_equal_executions_have_equal_keys_and_replicates_are_numbered():
    assert make_keys(("a", {"x": 1, "y": [2.5, None]})) == make_keys(("a", {"y": [2.5, None], "x": 1}))
    different = [
        *make_keys(("a", {"x": 1}), ("b", {"x": 1}), ("a", {"x": 2}), ("a", {"x": "1"})),
        *make_keys(("a", {"x": 1}), fingerprint={"provider": "local", "image": "b"}),
    ]
    assert len(set(different)) == 5
    first, other, second = make_keys(("a", {}), ("b", {}), ("a", {}))
    assert len({first, other, second}) == 3
    assert make_keys(("b", {}), ("a", {}), ("a", {})) == [other, first, second]
