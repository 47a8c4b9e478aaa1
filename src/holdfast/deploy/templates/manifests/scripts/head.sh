#!/bin/sh
# Written by `holdfast deploy render`. May be run again at any time; stops at the first error.
set -eu
cd "$(dirname "$0")"
NAMESPACE=[[ namespace ]]
