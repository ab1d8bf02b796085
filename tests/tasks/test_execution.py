"""The key of an execution, which shows whether it has been done before."""

from rlm_batch.tasks.execution import assign_keys

LOCAL = {"provider": "local"}


def keys(*items, fingerprint=LOCAL):
    return [execution.key for execution in assign_keys(items, fingerprint)]


def test_equal_code_variables_and_provider_have_one_key_in_every_run():
    items = [("a", {"x": 1, "y": [2.5, None]}), ("b", {})]
    assert keys(*items) == keys(*items)
    assert keys(("a", {"x": 1, "y": 2})) == keys(("a", {"y": 2, "x": 1}))


def test_every_setting_that_a_result_depends_on_changes_the_key():
    all_keys = [
        *keys(("a", {"x": 1})),
        *keys(("b", {"x": 1})),
        *keys(("a", {"x": 2})),
        *keys(("a", {"x": "1"})),
        *keys(("a", {"x": 1}), fingerprint={"provider": "local", "image": "b"}),
    ]
    assert len(set(all_keys)) == len(all_keys)


def test_replicates_have_different_keys_in_any_order():
    first, other, second = keys(("a", {}), ("b", {}), ("a", {}))
    assert len({first, other, second}) == 3
    assert keys(("b", {}), ("a", {}), ("a", {}))[1:] == [first, second]
