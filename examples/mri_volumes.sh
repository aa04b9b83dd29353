#!/usr/bin/env bash
# Makes volumes for train_mri of what Debian packages hold: a human head (Colin27, 1 mm) and a macaque's brain, as
# MINC2 in build/volumes. Prints the commands.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/setup.sh
setup minc-tools mricron-data

templates=/usr/share/mricron/templates
mkdir -p build/volumes
cd build/volumes
make_volume() {  # NAME TEMPLATE
  [[ ! -e $1.mnc ]] || return 0
  set -x
  zcat "$templates/$2.nii.gz" > "$1.nii"
  nii2mnc -quiet "$1.nii" "$1-1.mnc"
  mincconvert -2 -compress 4 -chunk 32 "$1-1.mnc" "$1.mnc.part"
  { set +x; } 2> /dev/null
  rm "$1.nii" "$1-1.mnc"
  mv "$1.mnc.part" "$1.mnc"
}
make_volume ch2 ch2
make_volume inia19 inia19-t1-brain
ls -l "$PWD"/*.mnc
