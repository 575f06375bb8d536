#!/bin/sh
# RUSTC_WORKSPACE_WRAPPER of ./run test: compiles integration tests without optimisation. That takes
# a tenth of the time, and most of them wait more than they compute. Those named below compute.
optimisation=
case " $* " in
*/sim/tests/* | */pool/tests/* | */parity/tests/*) ;;
*" --test "*) case " $* " in */tests/*.rs" "*) optimisation=-Copt-level=0 ;; esac ;;
esac
exec "$@" $optimisation
