#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of ./run fuzz: our own crates are compiled with the coverage that libFuzzer is guided by; what they
# depend on is that of the tests. One unit for each crate: the counters of several are lost to the linker.
exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1
