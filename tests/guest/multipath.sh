#!/bin/bash
# One volume of two nodes, through dm-multipath over iSCSI and through the kernel's own NVMe multipath, under load while one
# node dies and comes back. From the order: PORTALS and NVME_PORTALS (ADDRESS:PORT of each node), TARGET, INITIATOR, SUBSYSTEM,
# HOSTNQN, HOSTID, OFFSET, MEGABYTES (written over each protocol, behind the first OFFSET megabytes), RATE (writes a second),
# SECONDS_ALLOWED (the longest pause); SUMS, a file in the share, and FILES, how many it names: the checksums of an ext4 file system
# that begins the volume. The settings are those of docs/guides/initiators-linux.md.
#
# When the load runs, the file `loaded` appears in the share: from then on the host may do its worst.
. "${0%/*}/lib.sh"

# ---- dm-multipath over iSCSI ------------------------------------------------------------------------------------------

start_udev() {
    mkdir -p /run/udev
    /lib/systemd/systemd-udevd --daemon
    udevadm trigger
    udevadm settle -t 20
}

start_multipathd() {
    modules dm_multipath dm_round_robin dm_service_time scsi_dh_alua
    cat > /etc/multipath.conf << CONF
defaults {
    user_friendly_names no
    find_multipaths no
    polling_interval 1
    max_polling_interval 2
}
blacklist {
    devnode "^nvme"
}
devices {
    device {
        vendor "WINDROSE"
        product ".*"
        path_grouping_policy group_by_prio
        prio alua
        hardware_handler "1 alua"
        path_selector "service-time 0"
        path_checker tur
        failback immediate
        no_path_retry queue
        fast_io_fail_tmo 2
    }
}
CONF
    multipathd -d -s > /run/multipathd.log 2>&1 &
    try 10 multipathd show daemon
}

iscsi_login_everywhere() {
    local portal
    for portal in $PORTALS; do
        iscsiadm -m node -o new -T "$TARGET" -p "$portal"
        iscsiadm -m node -T "$TARGET" -p "$portal" --login
    done
    udevadm settle -t 20
}

# SendTargets at one node names the portals of all.
iscsi_names_all_portals() {
    local portal
    iscsiadm -m discovery -t sendtargets -p "${PORTALS%% *}" | tee /run/discovered
    for portal in $PORTALS; do
        grep -q "^$portal,.* $TARGET\$" /run/discovered
    done
}

multipath_disk() {
    local name
    name=$(multipathd show maps raw format "%n" | head -n 1)
    [ -n "$name" ] && [ -b "/dev/mapper/$name" ] && echo "/dev/mapper/$name"
}

multipath_paths() {
    [ "$(multipath -ll | grep -c 'active ready running')" = "$1" ]
}

two_iscsi_paths() {
    try 20 multipath_disk
    try 20 multipath_paths 2 || {
        multipath -ll
        cat /run/multipathd.log
        return 1
    }
    multipath -ll
}

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
check "udev" start_udev || exit 1
check "iSCSI: iscsid" start_iscsid || exit 1
[ "${TRANSLATED:-}" = yes ] || check "iSCSI: SendTargets at one node names both" iscsi_names_all_portals
check "iSCSI: login at both nodes" iscsi_login_everywhere || exit 1
check "iSCSI: multipathd" start_multipathd || exit 1
check "iSCSI: one disk with two active paths" two_iscsi_paths || exit 1
check "NVMe/TCP: one namespace with two live paths" nvme_connect_everywhere || exit 1
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
