#!/bin/sh
# Installs Chromium, with which the tests of the page run: from Debian's packages, as root. Elsewhere, install Chromium or
# Chrome yourself; without one these tests are skipped, but with CI=true they fail.
set -eu
if command -v chromium > /dev/null || command -v google-chrome > /dev/null; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  apt-get --quiet --quiet update
  DEBIAN_FRONTEND=noninteractive apt-get --quiet --quiet --yes install --no-install-recommends chromium fonts-dejavu-core > /dev/null
elif [ "${CI:-}" = true ]; then
  echo "install Chromium: the tests of the page need it" >&2
  exit 1
else
  echo "Without Chromium the tests of the page are skipped; to run them, install it." >&2
fi
