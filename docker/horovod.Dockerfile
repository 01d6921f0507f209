# What ddp.Dockerfile has, and Open MPI and Horovod, built for the torch that is inside.
#
#   docker/build                          both images, this one as hvdtrain:horovod
#   docker build -f docker/horovod.Dockerfile --build-arg DDP_IMAGE=hvdtrain:ddp -t hvdtrain:horovod .
#
# For GPUs: a DDP_IMAGE built on a CUDA development base (with KEEP_TORCH_HEADERS=yes); NCCL is then built in.
ARG DDP_IMAGE=hvdtrain:ddp
ARG BUILD_IMAGE=hvdtrain:build

# The environment with torch's headers: ddp.Dockerfile's stage `dependencies`. Without a finished wheel in the
# wheelhouse the script installs compilers and builds one; what hvdtrain needs for that, and no more, is copied, so that
# other changes do not compile Horovod anew.
FROM ${BUILD_IMAGE} AS horovod
COPY docker/wheelhouse /wheelhouse
COPY docker/build-horovod.sh /src/
COPY hvdtrain/errors.py /src/hvdtrain/
COPY hvdtrain/horovod_build /src/hvdtrain/horovod_build
COPY hvdtrain/cli/__init__.py hvdtrain/cli/build_horovod.py /src/hvdtrain/cli/
RUN sh /src/build-horovod.sh /wheels

FROM ${DDP_IMAGE}
LABEL org.opencontainers.image.title="hvdtrain, Horovod" org.opencontainers.image.licenses="Apache-2.0"
USER root
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends openmpi-bin \
    && rm -rf /var/lib/apt/lists/*
# Docker's default rules forbid reading another process's memory, Open MPI's short way between ranks of one host: without
# this line it complains with `Read -1, expected N, errno = 1` on every message.
RUN printf '%s\n' '# Works in containers without extra privileges.' 'btl_vader_single_copy_mechanism = none' \
    >>/etc/openmpi/openmpi-mca-params.conf
COPY --from=horovod /wheels /tmp/horovod
RUN pip install --no-cache-dir --no-deps --no-index /tmp/horovod/*.whl && horovodrun --check-build
USER hvdtrain
