"""How a request ended, from HAProxy's line about it."""

import pytest

from serve.access_log import AccessLog, outcome_of
from serve.metrics import ServiceMetrics


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("http POST 200 3 --", ("http", "ok", 0.003)),
        ("http POST 400 0 --", ("http", "refused", 0.0)),
        ("http POST 413 1 PR", ("http", "refused", 0.001)),
        ("http POST 503 12 --", ("http", "unavailable", 0.012)),
        ("http POST 500 12 --", ("http", "failed", 0.012)),
        ("http POST 502 12 SH", ("http", "failed", 0.012)),
        ("http POST 408 10000 cR", ("http", "abandoned", 10.0)),
        ("http POST 200 5 CD", ("http", "abandoned", 0.005)),
        ("http POST -1 5 CH", ("http", "abandoned", 0.005)),
        ("grpc POST 200 7 -- -", ("grpc", "ok", 0.007)),
        ("grpc POST 200 7 -- 0", ("grpc", "ok", 0.007)),
        ("grpc POST 200 7 -- 3", ("grpc", "refused", 0.007)),
        ("grpc POST 200 7 -- 14", ("grpc", "unavailable", 0.007)),
        ("grpc POST 200 7 -- 13", ("grpc", "failed", 0.007)),
        ("grpc POST 503 0 SC -", ("grpc", "unavailable", 0.0)),
        ("http <BADREQ> 400 0 PR", None),
        ("http GET 404 0 --", None),
    ],
)
def test_outcome(line: str, expected: tuple[str, str, float] | None) -> None:
    assert outcome_of(line) == expected


def test_what_is_left_in_the_pipe_is_counted_before_it_is_closed_and_a_line_of_no_request_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = ServiceMetrics()
    log = AccessLog(metrics)
    with open(log.descriptor, "w", closefd=False) as pipe:
        pipe.writelines(["http POST 200 20 --\n", "proxies stopped\n", "http POST ok 1 --\n"])
        pipe.writelines(["grpc POST 200 30 -- 13\n", "http <BADREQ> 400 0 PR\n"])
    log.close()

    def count(protocol: str, outcome: str) -> float | None:
        labels = {"protocol": protocol, "outcome": outcome}
        return metrics.registry.get_sample_value("slipway_request_duration_seconds_count", labels)

    assert (count("http", "ok"), count("grpc", "failed"), count("http", "refused")) == (1, 1, 0)
    assert "cannot be counted: 'proxies stopped\\n'" in caplog.text
