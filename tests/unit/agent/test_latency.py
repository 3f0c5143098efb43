import pytest

from agent.latency import KEPT, Latencies, quantile_ms


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([0.001], 0.99, 1.0), ([0.003, 0.001, 0.002], 0.5, 2.0),
     ([i / 1000 for i in range(100)], 0.99, 99.0)],
)  # fmt: skip
def test_quantiles_are_values_that_were_seen(values, share, expected):
    assert quantile_ms(values, share) == expected


def test_classes_are_apart_and_only_the_last_are_kept():
    latencies = Latencies()
    latencies.request("P0")
    latencies.first_token("P0", 9.0)
    for _ in range(KEPT):
        latencies.first_token("P0", 0.010)
        latencies.next_token("P2", 0.002)
    table = latencies.table()
    assert table["P0"]["requests_total"] == 1
    assert table["P0"]["ttft_p99_ms"] == 10.0
    assert table["P0"]["inter_token_p50_ms"] is None
    assert table["P2"]["inter_token_p50_ms"] == 2.0
    assert table["P1"]["ttft_p50_ms"] is None
