#!/bin/bash
# A subsystem of two nodes that gets a second namespace and loses it again, through the kernel's own multipath. From the order:
# PORTALS (ADDRESS:PORT of each node), DISCOVERY (of one of them), SUBSYSTEM, HOSTNQN, HOSTID, NSID (of the second namespace), MEGABYTES (written to each).
#
# `join-1` in the share asks for the second namespace, `part-1` for its end; the host answers by `joined-1` and `parted-1`. With
# `step-N` a node dies, with `back-N` it is back.
. "${0%/*}/lib.sh"

# One node is asked, and all paths come of it; it refers to the other one, which says the same.
discovers_everything() {
    local log=/run/discovered host=(--hostnqn "$HOSTNQN" --hostid "$HOSTID")
    nvme discover -t tcp -a "${DISCOVERY%:*}" -s "${DISCOVERY#*:}" "${host[@]}" | tee "$log"
    equal "$(grep -c 'discovery subsystem referral' "$log")" 1 "referrals"
    nvme connect-all -t tcp -a "${DISCOVERY%:*}" -s "${DISCOVERY#*:}" "${host[@]}"
    try 10 paths_to_subsystem 2
    nvme disconnect-all
    try 10 paths_to_subsystem 0
}

# paths_to_subsystem COUNT
paths_to_subsystem() {
    [ "$(grep -lsx "$SUBSYSTEM" /sys/class/nvme/nvme*/subsysnqn | wc -l)" = "$1" ]
}

connect_everywhere() {
    nvme_connect_everywhere --keep-alive-tmo 2
    try 10 namespaces_are 1
    try 10 paths_of 1 optimized optimized
}

# namespaces_are NSID...: those of the subsystem, each a disk.
namespaces_are() {
    local path found=()
    for path in /sys/class/nvme-subsystem/*/nvme*n*; do
        [ -b "/dev/${path##*/}" ] && found+=("$(cat "$path/nsid")")
    done
    [ "$(printf '%s\n' "${found[@]}" | sort -n | tr '\n' ' ')" = "$(printf '%s ' "$@")" ]
}

# disk NSID
disk() {
    local path
    for path in /sys/class/nvme-subsystem/*/nvme*n*; do
        grep -qx "$1" "$path/nsid" && echo "/dev/${path##*/}" && return 0
    done
    return 1
}

# paths_of NSID STATE...: how it is to be used through each node.
paths_of() {
    local nsid=$1 path found=()
    shift
    for path in /sys/class/nvme/nvme*/nvme*c*n*; do
        grep -qx "$nsid" "$path/nsid" && found+=("$(cat "$path/ana_state")")
    done
    [ "$(printf '%s\n' "${found[@]}" | sort)" = "$(printf '%s\n' "$@" | sort)" ]
}

gets_one() {
    touch "$GUEST_SHARE/join-1"
    try 60 test -e "$GUEST_SHARE/joined-1"
    try 30 namespaces_are 1 "$NSID" || { nvme list-subsys; return 1; }
    try 30 paths_of "$NSID" optimized optimized
    [ "$(cat "/sys/block/$(basename "$(disk 1)")/wwid")" != "$(cat "/sys/block/$(basename "$(disk "$NSID")")/wwid")" ]
}

load() {
    verified_load "$1" "$2" 4k 4
}

# Both namespaces at once: what is one's does not get to the other.
nodes_die() {
    local loads=() step
    load "$(disk 1)" 1 &
    loads+=($!)
    load "$(disk "$NSID")" 2 &
    loads+=($!)
    for step in 1 2; do
        sleep 1
        touch "$GUEST_SHARE/step-$step"
        try 90 test -e "$GUEST_SHARE/back-$step"
        try 60 paths_of "$NSID" optimized optimized || { nvme list-subsys; return 1; }
    done
    wait "${loads[0]}"
    wait "${loads[1]}"
}

loses_it() {
    touch "$GUEST_SHARE/part-1"
    try 60 test -e "$GUEST_SHARE/parted-1"
    try 30 namespaces_are 1 || { nvme list-subsys; return 1; }
    try 30 paths_of 1 optimized optimized
    load "$(disk 1)" 3
}

modules nvme-core nvme-tcp crc32c
must "one node's discovery brings all paths, and refers to the other node" discovers_everything
must "a subsystem with one namespace, through both nodes" connect_everywhere
must "a second one comes, on both paths" gets_one
must "nodes die under both: no error, and every byte is where it belongs" nodes_die
check "the second one goes, the first one stays" loses_it
nvme disconnect -n "$SUBSYSTEM"
exit "${checks_failed:-0}"
