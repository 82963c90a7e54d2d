"""Serving and training on Kubernetes."""
