# check=skip=SecretsUsedInArgOrEnv
# `docker build --target serve .`, and so train and gateway; `make image TARGET=serve` adds the labels.
# The bases are pinned by tag; the tags are those of src/slipway/compatibility.toml. A release build pins them by
# content too, with a digest such as sha256:….
# Docker's classic builder makes every stage above the one that is asked for; `make image` gives it only those that the
# target is made of: the one of its name, and any whose name begins with `<target>-`.
# The check that is left out, of Docker's newer builder, takes a variable with the path of a key for the key.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm
ARG PYTHON_DIGEST=
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.08-py3
ARG TRITON_DIGEST=
ARG NGINX_IMAGE=nginx:1.28.0
ARG NGINX_DIGEST=


FROM ${TRITON_IMAGE}${TRITON_DIGEST:+@}${TRITON_DIGEST} AS serve
COPY requirements/serve.lock /tmp/serve.lock
# Packages first and from the lock alone: a change of the source does not install them again. Into a folder of their
# own, because the Python of the base belongs to its distribution; searched first, because the base may have others. Not
# by PYTHONPATH: Triton's Python backend runs an interpreter that does not look at it.
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --target /opt/packages -r /tmp/serve.lock \
    && echo 'import sys; sys.path.insert(0, "/opt/packages")' \
        > "$(python3 -c 'import site; print(site.getsitepackages()[0])')/slipway.pth"
# Caches go to /tmp, so that the image runs read-only and as any user. Some packages ask for the user's name, which an
# arbitrary number does not have: USER answers for it.
ENV PYTHONPATH=/app:/app/src \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    USER=slipway \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache
WORKDIR /app
COPY src/slipway src/slipway
COPY serve serve
# Readable to any user, whatever the umask of the checkout was; and the places for mounts.
RUN chmod -R go+rX . && mkdir -m 1777 bundles model_repository
# HTTP, gRPC, metrics.
EXPOSE 8000 8001 8002
USER 1000:1000
# A golden image through the whole ensemble, over HTTP and gRPC: Triton's own health stays good when a model's process
# has died. Docker and Compose only show the result; Swarm acts on it, and Kubernetes asks the same by its probes.
HEALTHCHECK --interval=15s --timeout=10s --start-period=120s --retries=2 \
    CMD ["python3", "-m", "serve", "health"]
# The entry point stays that of the base: it prints NVIDIA's notices and starts the command, which becomes Triton. It
# serves what `python -m serve publish --target container` made; mount the model repository there, read-only.
CMD ["python3", "-m", "serve", "container"]
ARG TRITON_IMAGE
ARG VERSION=unknown
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="slipway serve" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${COMMIT}" \
    org.opencontainers.image.base.name="${TRITON_IMAGE}"


FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@}${PYTHON_DIGEST} AS train-packages
COPY requirements/train.lock /tmp/train.lock
RUN python -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r /tmp/train.lock


FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@}${PYTHON_DIGEST} AS train
COPY --from=train-packages /opt/venv /opt/venv
# As above: read-only, and as any user.
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
# A run records which lock it was trained with.
COPY requirements/train.lock requirements/train.lock
COPY configs configs
COPY src/slipway src/slipway
COPY train train
# And where the stages write; open to any user, as /tmp is, and the places for mounts.
RUN chmod -R go+rX . && mkdir -m 1777 data runs bundles
USER 1000:1000
ENTRYPOINT ["python", "-m", "train"]
CMD ["--help"]
ARG PYTHON_IMAGE
ARG VERSION=unknown
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="slipway train" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${COMMIT}" \
    org.opencontainers.image.base.name="${PYTHON_IMAGE}"


FROM ${NGINX_IMAGE}${NGINX_DIGEST:+@}${NGINX_DIGEST} AS gateway
# The entry point of the base fills the template in, with what the variables below say when a container starts. What a
# container has to be given are three files: keys and certificate, readable to its user. docs/gateway.md.
ENV NGINX_ENVSUBST_OUTPUT_DIR=/tmp \
    NGINX_ENVSUBST_FILTER=^GATEWAY_ \
    GATEWAY_LISTEN=0.0.0.0:8443 \
    GATEWAY_FILES=/etc/nginx/slipway \
    GATEWAY_SCRATCH=/tmp \
    GATEWAY_KEYS=/run/secrets/gateway_keys \
    GATEWAY_CERTIFICATE=/run/secrets/gateway_certificate \
    GATEWAY_CERTIFICATE_KEY=/run/secrets/gateway_certificate_key \
    GATEWAY_ACCESS_LOG=/dev/stdout \
    GATEWAY_STABLE_HTTP=triton:8000 \
    GATEWAY_STABLE_GRPC=triton:8001 \
    GATEWAY_CANARY_HTTP=triton:8000 \
    GATEWAY_CANARY_GRPC=triton:8001 \
    GATEWAY_CANARY_PERCENT=0 \
    GATEWAY_SHADOW_HTTP=triton:8000 \
    GATEWAY_SHADOW_GRPC=triton:8001 \
    GATEWAY_SHADOW_PERCENT=0 \
    GATEWAY_REQUESTS_PER_MINUTE=3000 \
    GATEWAY_BURST=50 \
    GATEWAY_MAX_REQUEST_BYTES=268435456
COPY deploy/gateway/nginx.conf.template /etc/nginx/templates/nginx.conf.template
COPY deploy/gateway/gateway.js /etc/nginx/slipway/gateway.js
COPY deploy/gateway/page /etc/nginx/slipway/page
RUN chmod -R go+rX /etc/nginx/templates /etc/nginx/slipway
EXPOSE 8443
USER 1000:1000
# Requests in flight are answered for up to 10 s.
STOPSIGNAL SIGQUIT
# Whether the server behind it is ready, which needs no key. Golden images are asked of that server itself.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30s --retries=2 \
    CMD ["sh", "-c", "exec curl -fks \"https://127.0.0.1:${GATEWAY_LISTEN##*:}/v2/health/ready\""]
# Under this name the entry point fills the template in; and without `-e` nginx would open a log below its read-only root.
CMD ["nginx", "-e", "stderr", "-c", "/tmp/nginx.conf", "-g", "daemon off;"]
ARG NGINX_IMAGE
ARG VERSION=unknown
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="slipway gateway" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${COMMIT}" \
    org.opencontainers.image.base.name="${NGINX_IMAGE}"
