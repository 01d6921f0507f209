# hvdtrain with native PyTorch: torch, hvdtrain, ssh. No Horovod, no MPI (horovod.Dockerfile adds both).
#
#   docker/build                          both images, this one as hvdtrain:ddp
#   docker build -f docker/ddp.Dockerfile -t hvdtrain:ddp .
#
# For GPUs: --build-arg BASE=nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04
#           --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cu128
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base
# procps: `ps` on every host shows what a job left; iproute2: which interface reaches whom; espeak-ng: examples/asr makes
# its corpus with it.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates espeak-ng iproute2 openssh-client openssh-server procps python3 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*

FROM base AS dependencies
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY docker/requirements.txt /tmp/requirements.txt
COPY docker/wheelhouse /wheelhouse
# A filled wheelhouse is the only source; an empty one means the indexes.
RUN python3 -m venv /opt/hvdtrain \
    && if ls /wheelhouse/torch-*.whl >/dev/null 2>&1; then \
        /opt/hvdtrain/bin/pip install --no-cache-dir --no-index --find-links /wheelhouse \
            "torch==${TORCH_VERSION}" -r /tmp/requirements.txt; \
    else \
        /opt/hvdtrain/bin/pip install --no-cache-dir -r /tmp/requirements.txt \
        && /opt/hvdtrain/bin/pip install --no-cache-dir "torch==${TORCH_VERSION}" --index-url "${TORCH_INDEX_URL}"; \
    fi

FROM dependencies AS package
COPY pyproject.toml README.md LICENSE /src/
COPY hvdtrain /src/hvdtrain
RUN /opt/hvdtrain/bin/pip wheel --no-deps --no-build-isolation --no-index -w /wheels /src

# What is left out of a copy of the environment: torch's headers and test programs serve compilers only.
FROM dependencies AS slim
ARG KEEP_TORCH_HEADERS=no
RUN cd /opt/hvdtrain/lib/python3*/site-packages \
    && rm -rf torch/test torch/lib/*.a \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && if [ "${KEEP_TORCH_HEADERS}" = no ]; then rm -rf torch/include torch/share; fi

FROM base
LABEL org.opencontainers.image.title="hvdtrain, native PyTorch" org.opencontainers.image.licenses="Apache-2.0"
ARG USER_ID=1000
# Some bases come with a user of that id. The password is `*`, not `!`: sshd refuses locked accounts, keys or not.
RUN old=$(getent passwd "${USER_ID}" | cut -d: -f1); if [ -n "$old" ]; then userdel -r "$old" 2>/dev/null; fi \
    ; useradd --uid "${USER_ID}" --user-group --create-home --shell /bin/bash --password '*' hvdtrain \
    && mkdir -p /run/sshd /shared /ssh /var/lib/hvdtrain-ssh \
    && chown hvdtrain:hvdtrain /shared /ssh /var/lib/hvdtrain-ssh
COPY --from=slim /opt/hvdtrain /opt/hvdtrain
ENV PATH=/opt/hvdtrain/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HVDTRAIN_SSH_STATE=/var/lib/hvdtrain-ssh
COPY docker/ssh/hvdtrain-ssh docker/ssh/entrypoint /usr/local/bin/
# First in PATH, so that launchers which switch host keys off on their command line are overruled.
COPY docker/ssh/ssh /usr/local/bin/ssh
RUN hvdtrain-ssh sshd-config >/etc/ssh/sshd_config \
    && hvdtrain-ssh ssh-config >/etc/ssh/ssh_config.d/hvdtrain.conf \
    && rm -rf /etc/ssh/sshd_config.d
COPY --from=package /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps --no-index /tmp/wheels/*.whl && hvdtrain --help >/dev/null
COPY examples /examples
USER hvdtrain
WORKDIR /home/hvdtrain
ENTRYPOINT ["/usr/local/bin/entrypoint"]
CMD ["bash"]
