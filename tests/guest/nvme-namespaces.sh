#!/bin/bash
# A subsystem of two nodes that gets a second namespace and loses it again, through the kernel's own multipath. From the order:
# PORTALS (ADDRESS:PORT of each node), DISCOVERY (of one of them), SUBSYSTEM, HOSTNQN, HOSTID, NSID (of the second namespace), MEGABYTES (written to each).
#
# `join-1` in the share asks for the second namespace, `part-1` for its end; the host answers by `joined-1` and `parted-1`. With
# `step-N` a node dies, with `back-N` it is back. `create-1` asks for another volume, `delete-1` for its end: `created-1` names its
# subsystem, `deleted-1` is empty.
. "${0%/*}/lib.sh"

# ask COMMAND OPTION...: nvme COMMAND at the node whose discovery is asked.
ask() {
    nvme "$@" -t tcp -a "${DISCOVERY%:*}" -s "${DISCOVERY#*:}" --hostnqn "$HOSTNQN" --hostid "$HOSTID"
}

# One node is asked, and all paths come of it; it refers to the other one, which says the same.
discovers_everything() {
    local log=/run/discovered
    ask discover | tee "$log"
    equal "$(grep -c 'discovery subsystem referral' "$log")" 1 "referrals"
    ask connect-all
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
    MEGABYTES=1 load "$(disk 1)" 3
}

# asker: the discovery controller that the kernel keeps.
asker() {
    local path
    for path in /sys/class/nvme/nvme*; do
        grep -qsx nqn.2014-08.org.nvmexpress.discovery "$path/subsysnqn" && echo "${path##*/}" && return 0
    done
    return 1
}

# hears COUNT: so many notices of another discovery log have come.
hears() {
    [ "$(grep -cx 'NVME_AEN=0x70f002' /run/heard)" -ge "$1" ]
}

# The kernel keeps a discovery controller, and says by its events when it is worth asking again.
keeps_asking() {
    local kept new generation monitor
    ask discover --persistent > /run/discovered
    kept=(--device="$(asker)")
    generation=$(sed -n 's/.*Generation counter //p' /run/discovered)
    stdbuf -oL udevadm monitor --kernel --property > /run/heard &
    monitor=$!
    try 10 grep -q KERNEL /run/heard
    touch "$GUEST_SHARE/create-1"
    try 60 test -e "$GUEST_SHARE/created-1"
    new=$(cat "$GUEST_SHARE/created-1")
    try 20 hears 1 || { cat /run/heard; return 1; }
    grep -q "^DEVPATH=.*/$(asker)\$" /run/heard
    ask discover "${kept[@]}" | tee /run/discovered
    grep -q "subnqn: *$new\$" /run/discovered
    [ "$(sed -n 's/.*Generation counter //p' /run/discovered)" -gt "$generation" ]
    # What there was is connected already; what is new is not.
    ask connect-all "${kept[@]}"
    equal "$(grep -lsx "$new" /sys/class/nvme/nvme*/subsysnqn | wc -l)" 2 "paths to the new one"
    nvme disconnect -n "$new"
    touch "$GUEST_SHARE/delete-1"
    try 60 test -e "$GUEST_SHARE/deleted-1"
    try 20 hears 2 || { cat /run/heard; return 1; }
    ask discover "${kept[@]}" | tee /run/discovered
    if grep -q "subnqn: *$new\$" /run/discovered; then return 1; fi
    kill $monitor
    nvme disconnect -d "$(asker)"
}

modules nvme-core nvme-tcp crc32c
must "one node's discovery brings all paths, and refers to the other node" discovers_everything
must "a subsystem with one namespace, through both nodes" connect_everywhere
must "a second one comes, on both paths" gets_one
must "nodes die under both: no error, and every byte is where it belongs" nodes_die
check "the second one goes, the first one stays" loses_it
check "who keeps asking hears of a volume that comes and goes, and finds it" keeps_asking
nvme disconnect -n "$SUBSYSTEM"
exit "${checks_failed:-0}"
