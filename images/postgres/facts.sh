#!/bin/sh
# Prints what this image contains, as JSON; run inside the image.
set -eu
major=$(postgres --version | sed -n 's/^postgres (PostgreSQL) \([0-9][0-9]*\)\..*/\1/p')
pgvector=$(sed -n "s/^default_version = '\(.*\)'/\1/p" "/usr/share/postgresql/$major/extension/vector.control")
test -e "/usr/lib/postgresql/$major/lib/vector.so"
test "$(locale -a | grep -cix 'c\.utf-\{0,1\}8')" -ge 1
printf '{"uid": %s, "gid": %s, "postgres_major": %s, "pgvector_version": "%s"}\n' \
    "$(id -u)" "$(id -g)" "$major" "$pgvector"
