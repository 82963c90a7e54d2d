"""The models that Triton runs in Python. Every release carries its own copy of this code."""
