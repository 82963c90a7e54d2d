"""How Triton is told to send traces: the spans of the ensemble and of each model, of queues and of computing."""

# Of so many requests that bring no trace with them, one is traced; those that bring a `traceparent` always are.
UNASKED_RATE = 1000


def options(url: str | None) -> list[str]:
    """Options of tritonserver. url: takes OpenTelemetry's traces, OTLP over HTTP; None if nobody does."""
    if url is None:
        return []
    return [
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url={url}",
        "--trace-config=opentelemetry,resource=service.name=slipway",
        "--trace-config=level=TIMESTAMPS",
        f"--trace-config=rate={UNASKED_RATE}",
    ]
