#!/bin/bash
# Compiles one kernel for sm_90a and prints registers, spills and warnings: cc.sh FILE OUT [-D...]
set -e
here=$(dirname "$0"); file=$1; out=$2; shift 2
nvcc=${NVCC:-nvcc}
$nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -cubin -Xptxas -v -I"$here/../hopper" -I"$here/.." "$@" -o "$out" "$here/../hopper/$file" 2>&1 |
    grep -v -E "^$|Compiling entry|gmem|Function properties" || true
