# The simulator, planning and the server, without torch: docker build -t foredraft . && docker run --rm foredraft doctor
# Other extras: docker build --build-arg EXTRAS=sim,gpu,server .
# A simulated server alone: docker build --build-arg EXTRAS=server -t foredraft-server . (the workflow does, and asks it)
# This file was checked by a linter (hadolint) and its commands outside a container; no image was built from it here.
FROM python:3.11-slim AS build
ARG EXTRAS=sim,measured,planning,server,report
WORKDIR /source
COPY constraints.txt .
RUN pip install --no-cache-dir --constraint constraints.txt build hatchling
COPY . .
RUN python -m build --wheel --no-isolation --outdir /wheel \
    && python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --constraint constraints.txt "$(echo /wheel/*.whl)[$EXTRAS]"

FROM python:3.11-slim
COPY --from=build /venv /venv
RUN useradd --create-home --uid 1000 foredraft
USER 1000
WORKDIR /data
ENTRYPOINT ["/venv/bin/foredraft"]
CMD ["--help"]
