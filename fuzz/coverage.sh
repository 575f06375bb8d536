#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of ./run fuzz: compiles our own crates with coverage for libFuzzer; their
# dependencies are shared with the tests. One codegen unit for each crate: with several, the linker
# loses counters.
exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1
