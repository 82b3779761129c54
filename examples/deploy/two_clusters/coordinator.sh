#!/usr/bin/env bash
# The coordinator between two clusters of different hardware, on a host that both reach on one port.
# Rounds end after a number of samples, so that fast and slow workers end them together.
set -euo pipefail

HOST=${1:?name under which both clusters reach this host, such as coordinator.example.org}

umask 077
if [ ! -e server.pem ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=coordinator \
    -addext "subjectAltName=DNS:$HOST" -keyout server.key -out server.pem
fi
if [ ! -e token ]; then
  head -c 32 /dev/urandom | base64 > token
fi
echo "Copy server.pem and token to each cluster, and no other file."

exec lightning-bytescheduler coordinator \
  --bind 0.0.0.0:7077 \
  --state state \
  --tls server.pem server.key --token-file token \
  --samples-per-round 262144 --wire-dtype int8 \
  --quorum 0.5 --lease-s 120
