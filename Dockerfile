# Samebits in a container, for docker, podman, buildah and Apptainer. docs/containers.md shows the commands.
#
#   docker build -t samebits:cpu .                                for CPUs
#   docker build -t samebits:cuda --build-arg DEVICE=cu128 .      for NVIDIA GPUs: torch brings its CUDA libraries
#
# DEVICE       cpu, or a CUDA version for which PyTorch has wheels: cu126, cu128, cu130
# TORCH_INDEX  the index for torch and torchvision; empty: the same as for the other packages
# EXTRAS       optional packages: all, or some of them such as classify,onnx
# BASE         a Linux with Python 3.11 or newer and its venv module
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG DEVICE=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${DEVICE}
ARG EXTRAS=all
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /usr/local/samebits \
    && if [ -n "$TORCH_INDEX" ]; then \
        /usr/local/samebits/bin/pip install --no-cache-dir --no-deps -c constraints.txt --index-url "$TORCH_INDEX" torch torchvision; \
    fi
# After torch: a change of the code does not install torch again.
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY src src
RUN /usr/local/samebits/bin/pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

FROM ${BASE}
COPY --from=build /usr/local/samebits /usr/local/samebits
# Not root, and also usable by any other user (`--user`, Apptainer, OpenShift): nothing is written outside /workspace and /tmp.
RUN useradd --uid 1000 --create-home samebits && mkdir /workspace && chown samebits /workspace
# HOME is for caches of matplotlib, torch and the MNIST files. torch asks for a user name, which other users do not have.
ENV PATH=/usr/local/samebits/bin:$PATH HOME=/tmp USER=samebits PYTHONUNBUFFERED=1
USER 1000
WORKDIR /workspace
CMD ["samebits", "--help"]
