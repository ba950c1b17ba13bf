# docker build -t fedbnn .
# docker run --rm -v "$PWD:/work" fedbnn train --config quickstart
FROM python:3.11-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl && rm -r /wheels /tmp/constraints.txt
RUN useradd --create-home fedbnn
USER fedbnn
WORKDIR /work
ENTRYPOINT ["fedbnn"]
CMD ["--help"]
