# Two images from one file:
#   docker build --target simulator -t fedfa .          docker run --rm -v "$PWD/runs:/fedfa/runs" fedfa run --preset digits-c2
#   docker build --target site      -t fedfa-site .     a Flower SuperNode or SuperLink; see docs/flower.md
FROM python:3.11-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 FEDFA_DATA=/fedfa/data
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY tools tools
# The CPU build of torch where pip finds it; --build-arg TORCH_INDEX=ADDRESS names an index that has it.
ARG TORCH_INDEX=
RUN python tools/install_torch.py

FROM base AS site
RUN pip install --constraint constraints.txt '.[data,flower]'
RUN useradd --create-home --uid 10001 fedfa && mkdir -p /fedfa && chown fedfa /fedfa
USER fedfa
WORKDIR /fedfa
ENTRYPOINT ["fedfa", "flower"]

FROM base AS simulator
RUN pip install --constraint constraints.txt '.[data,plots]'
RUN useradd --create-home --uid 10001 fedfa && mkdir -p /fedfa && chown fedfa /fedfa
USER fedfa
WORKDIR /fedfa
ENTRYPOINT ["fedfa"]
CMD ["--help"]
