#!/bin/bash
# dm-multipath with prio alua over a volume of two nodes, with each of SELECTORS (path selectors),
# under verified load, while a node is killed, cut off, isolated and drained, and returns. From the
# order: PORTALS (ADDRESS:PORT of each node), TARGET, INITIATOR, SELECTORS, TROUBLES (names of the
# faults; `under_trouble` in lib.sh describes them, by the sign NAME-SELECTOR), RATE (writes a
# second).
. "${0%/*}/lib.sh"

one_path() {
    try 20 multipath_paths 1 || { multipath -ll; return 1; }
}

both_paths() {
    try 60 multipath_paths 2 || { multipath -ll; return 1; }
    # shellcheck disable=SC2046
    try 20 used $(multipathd show paths raw format "%d") || { multipath -ll; return 1; }
}

all_priorities_are_equal() {
    local priorities
    priorities=$(multipathd show paths raw format "%p" | sort -u)
    equal "$priorities" 50 "priority of active/optimized paths"
    grep -q "$1" <(multipath -ll)
}

reselect() {
    sed -i "s/path_selector .*/path_selector \"$1 0\"/" /etc/multipath.conf
    multipathd reconfigure
    try 20 multipath_paths 2
}

export ISCSI_NOOP_S=1 ISCSI_REPLACEMENT_S=2
must "udev" start_udev
must "iscsid" start_iscsid
must "login at both nodes" iscsi_login_everywhere
must "multipathd" start_multipathd "round-robin 0"
must "one disk with two active paths" two_iscsi_paths
for selector in $SELECTORS; do
    must "$selector: chosen" reselect $selector
    must "$selector: both paths are active/optimized" all_priorities_are_equal $selector
    for name in $TROUBLES; do
        must "$selector: $name: its path goes, comes back and is used again; no error, no long pause" \
            under_trouble "$name-$selector" "$(multipath_disk)" one_path both_paths
    done
done
exit "${checks_failed:-0}"
