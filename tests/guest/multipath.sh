#!/bin/bash
# One volume of two nodes, through dm-multipath over iSCSI and through the kernel's own NVMe multipath, under load while one
# node dies and comes back. From the order: PORTALS and NVME_PORTALS (ADDRESS:PORT of each node), TARGET, INITIATOR, SUBSYSTEM,
# HOSTNQN, HOSTID, OFFSET, MEGABYTES (written over each protocol, behind the first OFFSET megabytes), RATE (writes a second),
# SECONDS_ALLOWED (the longest pause); SUMS, a file in the share, and FILES, how many it names: the checksums of an ext4 file system
# that begins the volume. The settings are those of docs/guides/initiators-linux.md.
#
# When the load runs, the file `loaded` appears in the share: from then on the host may do its worst.
. "${0%/*}/lib.sh"

# ---- NVMe/TCP multipath -----------------------------------------------------------------------------------------------

# Keep-alives find a node that says nothing; a namespace that no path serves waits for one (ctrl-loss-tmo -1).
nvme_connect_everywhere() {
    local portal
    for portal in $NVME_PORTALS; do
        nvme connect -t tcp -a "${portal%:*}" -s "${portal#*:}" -n "$SUBSYSTEM" --hostnqn "$HOSTNQN" --hostid "$HOSTID" \
            --keep-alive-tmo 2 --reconnect-delay 1 --ctrl-loss-tmo -1
    done
    try 10 nvme_disk
    try 10 nvme_paths 2
    nvme list-subsys
    for policy in /sys/class/nvme-subsystem/*/iopolicy; do echo round-robin > "$policy"; done
}

nvme_paths() {
    [ "$(nvme list-subsys | grep -c ' live')" = "$1" ]
}

# ---- load -------------------------------------------------------------------------------------------------------------

# load NAME DISK OFFSET_MEGABYTES: every block of a range written once, at an even rate, and read back at the end.
load() {
    fio --name="$1" --filename="$2" --offset="$3M" --size="${MEGABYTES}M" --rw=randwrite --bs=4k --iodepth=4 --rate_iops="$RATE" \
        --ioengine=libaio --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1 --output-format=terse > "/run/fio.$1" 2>&1
}

start_load() {
    load iscsi "$(multipath_disk)" "$OFFSET" &
    iscsi_load=$!
    load nvme "$(nvme_disk)" $((OFFSET + MEGABYTES)) &
    nvme_load=$!
    sleep 2
    touch "$GUEST_SHARE/loaded"
}

# ended NAME STATUS: no error, and the longest that a write took (field 80 of fio's terse format, microseconds).
ended() {
    cat "/run/fio.$1"
    equal "$2" 0 "status of fio"
    awk -F';' -v limit="$SECONDS_ALLOWED" -v share="$GUEST_SHARE" -v name="$1" '
        NF > 100 { found = 1; longest = $80 / 1e6 }
        END {
            if (!found) exit 1
            printf "%s: the longest write took %.2f s\n", name, longest
            printf "note\tthe longest write over %s took %.2f s\n", name, longest >> (share "/report")
            exit longest > limit
        }' "/run/fio.$1"
}

both_back() {
    try 60 multipath_paths 2 || { multipath -ll; return 1; }
    try 60 nvme_paths 2 || { nvme list-subsys; return 1; }
}

# verify DISK: the file system that was copied onto the volume, every file's checksum.
verify() {
    modules ext4
    mkdir -p /run/mnt
    trap 'mountpoint -q /run/mnt && umount /run/mnt' EXIT
    mount -t ext4 -o ro "$1" /run/mnt
    equal "$(wc -l < "$GUEST_SHARE/$SUMS")" "$FILES" "files named"
    (cd /run/mnt && sha256sum --check --quiet --strict "$GUEST_SHARE/$SUMS")
    umount /run/mnt
}

modules nvme-core nvme-tcp crc32c
export ISCSI_NOOP_S=1 ISCSI_REPLACEMENT_S=2
must "udev" start_udev
must "iSCSI: iscsid" start_iscsid
if [ "${TRANSLATED:-}" != yes ]; then check "iSCSI: SendTargets at one node names both" iscsi_names_all_portals; fi
must "iSCSI: login at both nodes" iscsi_login_everywhere
must "iSCSI: multipathd" start_multipathd
must "iSCSI: one disk with two active paths" two_iscsi_paths
must "NVMe/TCP: one namespace with two live paths" nvme_connect_everywhere
start_load
wait $iscsi_load
iscsi_status=$?
wait $nvme_load
nvme_status=$?
check "iSCSI: no error, all verified, no pause above $SECONDS_ALLOWED s" ended iscsi $iscsi_status
check "NVMe/TCP: no error, all verified, no pause above $SECONDS_ALLOWED s" ended nvme $nvme_status
check "both paths of both are back" both_back
check "iSCSI: mounted, $FILES files have their checksums" verify "$(multipath_disk)"
check "NVMe/TCP: mounted, $FILES files have their checksums" verify "$(nvme_disk)"
exit "${checks_failed:-0}"
