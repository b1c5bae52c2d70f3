from cpd.common.buckets import Buckets


def test_a_value_counts_in_the_first_bucket_that_holds_it() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5, 100.0):
        buckets.add(value)
    assert buckets.counts == [2, 1, 2]
    assert buckets.sum == 105.5
