#!/bin/bash
# A volume whose copies lie in pools of disks, through dm-multipath at both of its nodes, while disks and nodes go. From the order:
# PORTALS (ADDRESS:PORT of each node), TARGET, INITIATOR, COLD_MIB (written once, at the beginning of the volume, and read all the
# time), LOAD_AT_MIB and LOAD_MIB (what is written all the time), RATE (writes a second), PAUSE_MS (the longest of them).
#
# `loaded` in the share says that both run: the host may do its worst until it makes `mended`. `rested` says that nothing is written
# any more: the host takes node b away and makes `alone`; after `checked` it brings it back and makes `back`.
. "${0%/*}/lib.sh"

# cold DISK OPTION...: sequential, in all sizes up to a stripe and more.
cold() {
    local disk=$1
    shift
    fio_quiet --name=cold --filename="$disk" --size="${COLD_MIB}M" --rw=write --bsrange=64k-512k --iodepth=4 --verify=crc32c "$@"
}

steady_reader() {
    while [ ! -e /run/stop ]; do
        cold "$1" --verify_only --rate=8m || return 1
        rounds=$((${rounds:-0} + 1))
    done
    echo "read $rounds times"
}

runs() {
    kill -0 "$1" || { cat /run/fio.load /run/fio.out; return 1; }
}

# The load goes on for as long as the host wants.
works_on() {
    local disk=$1 load reader
    steady_load "$disk" &
    load=$!
    steady_reader "$disk" &
    reader=$!
    sleep 2
    touch "$GUEST_SHARE/loaded"
    until [ -e "$GUEST_SHARE/mended" ]; do
        runs $load
        runs $reader
        sleep 0.2
    done
    touch /run/stop
    wait $load || { cat /run/fio.load; return 1; }
    wait $reader || { cat /run/fio.out; return 1; }
    no_pause "under load" "$PAUSE_MS"
}

sum() {
    dd if="$1" bs=1M iflag=direct status=none | sha256sum
}

both_paths() {
    try 60 multipath_paths 2 || { multipath -ll; return 1; }
    # shellcheck disable=SC2046
    try 20 used_for_reading $(multipathd show paths raw format "%d") || { multipath -ll; return 1; }
}

# used_for_reading DISK...: reads go through each of these.
used_for_reading() {
    local disk before=()
    for disk; do before+=("$(read_from "$disk")"); done
    dd if="$(multipath_disk)" of=/dev/null bs=64k count=256 iflag=direct status=none
    for disk; do
        [ "$(read_from "$disk")" -gt "${before[0]}" ] || { echo "nothing goes through $disk"; return 1; }
        before=("${before[@]:1}")
    done
}

read_from() {
    awk '{ print $1 }' "/sys/block/$1/stat"
}

# All is as it was before the other node went, byte by byte.
is_whole_alone() {
    local before
    before=$(sum "$1")
    touch "$GUEST_SHARE/rested"
    try 60 test -e "$GUEST_SHARE/alone"
    equal "$(sum "$1")" "$before" "checksum of the volume, at node a alone"
    cold "$1" --verify_only
    try 20 multipath_paths 1 || { multipath -ll; return 1; }
    touch "$GUEST_SHARE/checked"
    try 120 test -e "$GUEST_SHARE/back"
    both_paths
    equal "$(sum "$1")" "$before" "checksum of the volume, at both nodes"
}

export ISCSI_NOOP_S=1 ISCSI_REPLACEMENT_S=2
must "pools: udev" start_udev
must "pools: iscsid" start_iscsid
must "pools: login at both nodes" iscsi_login_everywhere
must "pools: multipathd" start_multipathd "round-robin 0"
must "pools: one disk with two active paths" two_iscsi_paths
disk=$(multipath_disk)
must "pools: $COLD_MIB MiB are written and verified" cold "$disk" --do_verify=1
must "pools: a disk of each goes, a node dies, disks are replaced: no error, all verified, no long pause" works_on "$disk"
must "pools: the other node dies: all is there, by its checksum" is_whole_alone "$disk"
exit "${checks_failed:-0}"
