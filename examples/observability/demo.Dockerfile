# The demo's image, built from the repository's root; demo.Dockerfile.dockerignore says what goes in.
FROM python:3.13.7-slim-bookworm
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[cli,otlp]'
USER nobody
WORKDIR /tmp
ENTRYPOINT ["idemguard"]
