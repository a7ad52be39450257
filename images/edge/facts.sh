#!/bin/sh
# Prints what this image contains, as JSON; run inside the image.
set -eu
version=$(caddy version | sed 's/^v\([^ ]*\).*/\1/')
printf '{"uid": %s, "gid": %s, "caddy_version": "%s"}\n' "$(id -u)" "$(id -g)" "$version"
