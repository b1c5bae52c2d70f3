#!/bin/sh
# Installs programs that only tests need, from Debian's packages, as root: Chromium, in which the tests of the page run, and
# Prometheus with promtool, which read the scrape configuration, the alerts and the dashboard's queries. Elsewhere, install
# them yourself; without one its tests are skipped, but with CI=true they fail.
set -eu
have() {
  command -v "$1" > /dev/null
}
missing=""
have chromium || have google-chrome || missing="$missing chromium"
{ have prometheus && have promtool; } || missing="$missing prometheus"
if [ -z "$missing" ]; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! have apt-get; then
  if [ "${CI:-}" = true ]; then
    echo "install what tests need:$missing" >&2
    exit 1
  fi
  echo "Some tests are skipped; to run them, install:$missing" >&2
  exit 0
fi
apt-get --quiet --quiet update
for program in $missing; do
  case $program in
    chromium)
      DEBIAN_FRONTEND=noninteractive apt-get --quiet --quiet --yes install --no-install-recommends \
        chromium fonts-dejavu-core > /dev/null
      ;;
    prometheus) # the programs alone: the package would start a service
      folder=$(mktemp -d)
      (cd "$folder" && apt-get --quiet --quiet -o APT::Sandbox::User=root download prometheus)
      dpkg-deb --extract "$folder"/prometheus_*.deb "$folder/package"
      install "$folder/package/usr/bin/prometheus" "$folder/package/usr/bin/promtool" /usr/local/bin
      rm -r "$folder"
      ;;
  esac
done
