# docker build -t konkanivani .
# docker run --gpus all --shm-size=1g --user "$(id -u):$(id -g)" -v "$PWD:/work" konkanivani train --device cuda \
#     --train_manifest corpus/train.jsonl --valid_manifest corpus/valid.jsonl
#
# --shm-size: the data loading workers pass batches through /dev/shm, for which Docker's default is 64 MB. If it is too
# small, fewer workers or none are used, with the same results.

FROM python:3.11-slim AS wheel
WORKDIR /source
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY konkanivani konkanivani
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# PyTorch's wheels contain CUDA's libraries; the image provides the driver's interface and needs driver 580 or newer.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/konkanivani
ENV PATH=/opt/konkanivani/bin:$PATH
# For GPUs before Turing or an older driver: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.10,<2.15" "torchaudio>=2.10,<2.12"
ARG EXTRAS=synthesis,export,whisper
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/konkanivani-*.whl)[$EXTRAS]"

RUN useradd --create-home --uid 10001 konkanivani && mkdir /work && chown konkanivani /work
# Compiled kernels and caches, also for a user without a home folder (--user).
ENV HOME=/tmp XDG_CACHE_HOME=/tmp
USER konkanivani
WORKDIR /work
ENTRYPOINT ["konkanivani"]
CMD ["--help"]
