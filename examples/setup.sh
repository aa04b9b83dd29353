# shellcheck shell=bash
# To be sourced by scripts that build Torus on Debian 12, Ubuntu 24.04 or newer.

# A program counts wherever it comes from, a library if its package is installed.
have() {
  case $1 in
    cmake | ccache | python3) command -v "$1" > /dev/null ;;
    ninja-build) command -v ninja > /dev/null ;;
    g++) command -v c++ > /dev/null ;;
    *) [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2> /dev/null) == installed ]] ;;
  esac
}

# setup [PACKAGE...]: installs what the library and the examples need, and the packages named, where missing.
setup() {
  local package missing=() as_root=(env DEBIAN_FRONTEND=noninteractive)
  for package in cmake ninja-build g++ libeigen3-dev libhdf5-dev libcli11-dev libpng-dev "$@"; do
    have "$package" || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0

  local update=(apt-get update -q) install=(apt-get install -q -y --no-install-recommends "${missing[@]}")
  if ! command -v apt-get > /dev/null; then
    echo "setup: no apt-get here; install by hand what Debian calls ${missing[*]}" >&2
    return 1
  fi
  if [[ $(id -u) -ne 0 ]]; then
    if ! command -v sudo > /dev/null || ! { sudo -n true 2> /dev/null || [[ -t 0 ]]; }; then
      echo "setup: not root; this installs what is missing: sudo ${update[*]} && sudo ${install[*]}" >&2
      return 1
    fi
    as_root=(sudo "${as_root[@]}")
  fi
  echo "setup: installing ${missing[*]}"
  if ! { "${as_root[@]}" "${update[@]}" && "${as_root[@]}" "${install[@]}"; }; then
    echo "setup: this failed: ${update[*]} && ${install[*]}" >&2
    return 1
  fi
}
