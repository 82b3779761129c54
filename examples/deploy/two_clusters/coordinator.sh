#!/usr/bin/env bash
# The coordinator between two clusters of different hardware, on a host that both reach on one port.
# Rounds end after a number of samples, so that fast and slow workers end them together.
set -euo pipefail

HOST=${1:?name under which both clusters reach this host, such as coordinator.example.org}

umask 077
if [ ! -e certs ]; then
  lightning-bytescheduler certificates certs --host "$HOST" --client cluster-a --client cluster-b
fi
if [ ! -e token ]; then
  head -c 32 /dev/urandom | base64 > token
fi
echo "Copy certs/ca.pem, token, and certs/client-cluster-a.* or certs/client-cluster-b.* to each cluster, and no other file."

exec lightning-bytescheduler coordinator \
  --bind 0.0.0.0:7077 \
  --state state \
  --tls certs/server.pem certs/server.key certs/ca.pem --token-file token \
  --samples-per-round 262144 --wire-dtype int8 \
  --quorum 0.5 --grace-s auto --lease-s 120
