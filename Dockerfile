# syntax=docker/dockerfile:1
# Control plane, web and agents: `docker run IMAGE control`, `web`, `agent`, `server`. Exactly the versions
# of locks/, by hash. Workers need your code too: build theirs on top, or see `holdfast new project`.

FROM python:3.13-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY locks/build.txt locks/image.txt ./
RUN pip install --require-hashes -r build.txt \
    && python -m venv /opt/holdfast \
    && /opt/holdfast/bin/pip install --require-hashes -r image.txt
COPY pyproject.toml README.md LICENSE ./
COPY examples/shop.py ./examples/
COPY src ./src
RUN pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && /opt/holdfast/bin/pip install --no-deps --no-index dist/*.whl

FROM python:3.13-slim
ENV PYTHONUNBUFFERED=1 PATH=/opt/holdfast/bin:$PATH
COPY --from=build /opt/holdfast /opt/holdfast
RUN useradd --uid 1000 --create-home holdfast
USER 1000
WORKDIR /home/holdfast
EXPOSE 8000 8080
ENTRYPOINT ["holdfast"]
CMD ["control", "--health-port", "8080"]
