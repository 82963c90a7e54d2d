# Two images: `docker build --target train .` and `docker build --target serve .`
# The bases are pinned by tag; the tags are those of src/slipway/compatibility.toml.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.08-py3


# Packages first and from the lock alone: a change of the source does not install them again.
FROM ${PYTHON_IMAGE} AS train-packages
COPY requirements/train.lock /tmp/train.lock
RUN python -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r /tmp/train.lock


FROM ${PYTHON_IMAGE} AS train
COPY --from=train-packages /opt/venv /opt/venv
# Caches go to /tmp, so that the image runs read-only and as any user. PyTorch and others ask for the user's
# name, which an arbitrary number does not have: USER answers for it.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app:/app/src \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    USER=slipway \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    TORCH_HOME=/tmp/torch \
    TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    TRITON_CACHE_DIR=/tmp/triton \
    MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /app
# Where the stages write; open to any user, as /tmp is, and the places for mounts.
RUN useradd --uid 1000 slipway \
    && mkdir -m 1777 data runs bundles
# A run records which lock it was trained with.
COPY requirements/train.lock requirements/train.lock
COPY configs configs
COPY src/slipway src/slipway
COPY train train
USER 1000:1000
ENTRYPOINT ["python", "-m", "train"]
CMD ["--help"]


FROM ${TRITON_IMAGE} AS serve
COPY requirements/serve.lock /tmp/serve.lock
# Into a folder of their own: the Python of the base belongs to its distribution.
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --target /opt/packages -r /tmp/serve.lock
ENV PYTHONPATH=/app:/app/src:/opt/packages \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    USER=slipway \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache
WORKDIR /app
RUN mkdir -m 1777 bundles model_repository
COPY src/slipway src/slipway
COPY serve serve
# HTTP, gRPC, metrics.
EXPOSE 8000 8001 8002
USER 1000:1000
# The entry point stays that of the base: it prints NVIDIA's notices and starts the command. It serves what
# `python -m serve publish --target container` made; mount the model repository there, read-only.
CMD ["tritonserver", "--model-repository=/app/model_repository/current/models", \
    "--model-control-mode=none", "--disable-auto-complete-config", "--exit-timeout-secs=10"]
