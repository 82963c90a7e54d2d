"""From a proven bundle to an answered request: publish, start Triton, ask it, check it. Never imports `train`."""
