"""The models that Triton runs in Python. Every release carries its own copy of this code."""

# The id of requests that are no client's, but ask whether the service is well.
PROBE = "slipway-probe"
