#!/bin/bash
# dm-multipath with prio alua over a volume of two nodes, with both of the usual path selectors, under verified load, while a node is
# killed, cut off and drained, and comes back. From the order: PORTALS (ADDRESS:PORT of each node), TARGET, INITIATOR, TROUBLES (their
# names), SECONDS_ALLOWED (the longest pause), RATE (writes a second).
#
# For each trouble it makes a file `NAME-SELECTOR-go` in the share; the host brings the trouble and makes `NAME-SELECTOR-down`. When the
# guest has seen that in its paths it makes `NAME-SELECTOR-seen`; the host mends it and makes `NAME-SELECTOR-up`.
. "${0%/*}/lib.sh"

DATA_MIB=8

# Verified writes through the map, one fio after the other, until told to stop.
load() {
    local disk
    disk=$(multipath_disk)
    while [ ! -e "/run/stop.$1" ]; do
        fio --name=load --filename="$disk" --size="${DATA_MIB}M" --rw=randwrite --bs=4k --iodepth=4 --rate_iops="$RATE" \
            --ioengine=libaio --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1 --output-format=terse \
            > "/run/fio.$1" 2>&1 || return 1
        awk -F';' 'NF > 100 { print $80 / 1e6 }' "/run/fio.$1" >> "/run/longest.$1"
    done
}

# The disks below the map.
path_disks() {
    multipathd show paths raw format "%d"
}

written() {
    awk '{ print $5 }' "/sys/block/$1/stat"
}

# used: writes go through every path.
used() {
    local disk before=()
    for disk in $(path_disks); do before+=("$disk $(written "$disk")"); done
    sleep 2
    equal "${#before[@]}" 2 "paths"
    for disk in "${before[@]}"; do
        [ "$(written "${disk% *}")" -gt "${disk#* }" ] || { echo "nothing goes through ${disk% *}"; multipath -ll; return 1; }
    done
}

# alive: the load has not ended.
alive() {
    kill -0 "$load" || { cat "/run/fio.$selector"; return 1; }
}

# trouble NAME: the path goes, the load does not; the path comes back and is used again.
trouble() {
    local name="$1-$selector"
    touch "$GUEST_SHARE/$name-go"
    try 60 test -e "$GUEST_SHARE/$name-down"
    try 20 multipath_paths 1 || { multipath -ll; return 1; }
    alive
    touch "$GUEST_SHARE/$name-seen"
    try 120 test -e "$GUEST_SHARE/$name-up"
    try 60 multipath_paths 2 || { multipath -ll; return 1; }
    try 20 used
    alive
}

all_priorities_are_equal() {
    local priorities
    priorities=$(multipathd show paths raw format "%p" | sort -u)
    equal "$priorities" 50 "priority of active/optimized paths"
    grep -q "$1" <(multipath -ll)
}

no_error() {
    touch "/run/stop.$selector"
    wait "$load"
    cat "/run/longest.$selector"
    awk -v limit="$SECONDS_ALLOWED" -v share="$GUEST_SHARE" -v name="$selector" '
        $1 > longest { longest = $1 }
        END {
            printf "note\tthe longest write by %s took %.2f s\n", name, longest >> (share "/report")
            exit NR == 0 || longest > limit
        }' "/run/longest.$selector"
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
for selector in round-robin service-time; do
    must "$selector: chosen" reselect $selector
    must "$selector: both paths are active/optimized" all_priorities_are_equal $selector
    load $selector &
    load=$!
    must "$selector: both paths are used" used
    for name in $TROUBLES; do
        must "$selector: $name: its path goes, comes back and is used again" trouble "$name"
    done
    # Not in a subshell: it waits for the load.
    no_error > /run/no_error.log 2>&1
    status=$?
    check "$selector: no error, all verified, no pause above $SECONDS_ALLOWED s" equal $status 0 "the load: $(cat /run/no_error.log)"
done
exit "${checks_failed:-0}"
