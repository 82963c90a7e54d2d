"""The gateway: nginx in front of Triton, or of `serve up`, for clients who are strangers."""
