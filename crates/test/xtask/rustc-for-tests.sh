#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of ./run test. It compiles our own crates with clippy's lints, so that no
# second pass over the workspace is needed, and integration tests without optimisation: that takes a
# tenth of the time, and most of them wait more than they compute. Those named below compute.
optimisation=
case " $* " in
*/sim/tests/* | */pool/tests/* | */parity/tests/*) ;;
*" --test "*) case " $* " in */tests/*.rs" "*) optimisation=-Copt-level=0 ;; esac ;;
esac
exec clippy-driver "$@" $optimisation
