"""The key of an execution, which shows whether an earlier run has its result."""

from rlm_batch.tasks.execution import assign_keys

LOCAL = {"provider": "local"}


def make_keys(*items, fingerprint=LOCAL):
    return [execution.key for execution in assign_keys(items, fingerprint)]


def test_equal_code_variables_and_provider_have_one_key_in_every_run():
    items = [("a", {"x": 1, "y": [2.5, None]}), ("b", {})]
    assert make_keys(*items) == make_keys(*items)
    assert make_keys(("a", {"x": 1, "y": 2})) == make_keys(("a", {"y": 2, "x": 1}))


def test_every_setting_that_a_result_depends_on_changes_the_key():
    all_keys = [
        *make_keys(("a", {"x": 1})),
        *make_keys(("b", {"x": 1})),
        *make_keys(("a", {"x": 2})),
        *make_keys(("a", {"x": "1"})),
        *make_keys(("a", {"x": 1}), fingerprint={"provider": "local", "image": "b"}),
    ]
    assert len(set(all_keys)) == len(all_keys)


def test_replicates_have_different_keys_in_any_order():
    first, other, second = make_keys(("a", {}), ("b", {}), ("a", {}))
    assert len({first, other, second}) == 3
    assert make_keys(("b", {}), ("a", {}), ("a", {}))[1:] == [first, second]
