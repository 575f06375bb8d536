# For the scripts that run in a guest: checks that report to the host, the two kernel initiators, file systems under load.
# shellcheck shell=bash

# check NAME COMMAND...: one line of the report; COMMAND runs with `set -e` in a subshell, its output goes to the host when
# it fails. Not for use in a condition, where bash would ignore that `set -e`.
check() {
    local name=$1 begun=$EPOCHREALTIME status
    shift
    echo "guest: $name"
    (
        set -e
        "$@"
    ) > /run/check.log 2>&1
    status=$?
    if [ $status = 0 ]; then
        printf 'ok\t%s\t%s\n' "$name" "$(seconds_since "$begun")" >> "$GUEST_SHARE/report"
    else
        checks_failed=$((${checks_failed:-0} + 1))
        {
            cat /run/check.log
            echo "--- kernel"
            dmesg | tail -n 15
        } > "$GUEST_SHARE/failed-$checks_failed.log"
        printf 'failed\t%s\tfailed-%s.log\n' "$name" "$checks_failed" >> "$GUEST_SHARE/report"
    fi
    return $status
}

# must NAME COMMAND...: a check without which the rest is pointless.
must() {
    check "$@"
    [ $? = 0 ] || exit "$checks_failed"
}

seconds_since() {
    awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }'
}

# try SECONDS COMMAND...: until it succeeds.
try() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.1
    done
}

# Whether disks have completed more than 20 writes since there were $1.
are_written() {
    [ "$(writes_completed)" -gt $(($1 + 20)) ]
}

# The writes that all disks have completed.
writes_completed() {
    awk '{ writes += $8 } END { print writes }' /proc/diskstats
}

# meanwhile SAID HEARD COMMAND...: signals SAID to the host once COMMAND writes to a disk. COMMAND runs on while the host
# acts, until HEARD is there.
meanwhile() {
    local said=$1 heard=$2 command before
    shift 2
    before=$(writes_completed)
    "$@" &
    command=$!
    try 60 are_written "$before"
    touch "$GUEST_SHARE/$said"
    try 60 test -e "$GUEST_SHARE/$heard"
    wait $command
}

modules() {
    local m
    for m; do modprobe -q "$m" 2> /dev/null || true; done
}

equal() {
    [ "$1" = "$2" ] || {
        echo "$3: expected $2, found $1"
        return 1
    }
}

# ---- iSCSI -----------------------------------------------------------------------------------------------------------

# iscsid with a node database of its own: the host's is neither readable for all users nor empty.
start_iscsid() {
    modules iscsi_tcp sd_mod sg crc32c
    mkdir -p /run/lock/iscsi
    busybox mount -t tmpfs tmpfs /etc/iscsi
    echo "InitiatorName=$INITIATOR" > /etc/iscsi/initiatorname.iscsi
    cat > /etc/iscsi/iscsid.conf << CONF
node.startup = manual
node.session.timeo.replacement_timeout = ${ISCSI_REPLACEMENT_S:-60}
node.conn[0].timeo.noop_out_interval = ${ISCSI_NOOP_S:-5}
node.conn[0].timeo.noop_out_timeout = ${ISCSI_NOOP_S:-10}
node.conn[0].timeo.login_timeout = 15
node.session.cmds_max = 128
node.session.queue_depth = 64
node.session.iscsi.InitialR2T = No
node.session.iscsi.ImmediateData = Yes
CONF
    iscsid -f > /run/iscsid.log 2>&1 &
    try 10 sh -c 'iscsiadm -m session > /dev/null 2>&1; [ $? = 21 ]' # 21: no session, but iscsid answers
}

# discover: what SendTargets tells must name the target.
iscsi_discover() {
    iscsiadm -m discovery -t sendtargets -p "$PORTAL" | tee /run/discovered
    grep -q " $TARGET\$" /run/discovered
    # Behind an address translation the target names an address that does not lead to it: make the record by hand.
    grep -q "^$PORTAL," /run/discovered || iscsiadm -m node -o new -T "$TARGET" -p "$PORTAL"
}

# iscsi_login DIGEST (None | CRC32C): the record says what to offer; the session must have got it.
iscsi_login() {
    local key
    for key in HeaderDigest DataDigest; do
        iscsiadm -m node -T "$TARGET" -p "$PORTAL" -o update -n "node.conn[0].iscsi.$key" -v "$1"
    done
    iscsiadm -m node -T "$TARGET" -p "$PORTAL" --login
    iscsiadm -m session -P 2 > /run/session
    for key in HeaderDigest DataDigest; do
        equal "$(sed -n "s/^[[:space:]]*$key: //p" /run/session)" "$1" "negotiated $key"
    done
    try 10 iscsi_disk
}

# session_disk ATTRIBUTE VALUE PORTAL: the disk of the session with a portal whose attribute (initiatorname, targetname) is so.
session_disk() {
    local session connection path
    for session in /sys/class/iscsi_session/session*; do
        [ "$(cat "$session/$1" 2> /dev/null)" = "$2" ] || continue
        for connection in "$session"/device/connection*/iscsi_connection/*; do
            [ "$(cat "$connection/persistent_address"):$(cat "$connection/persistent_port")" = "$3" ] || continue
            for path in "$session"/device/target*/*/block/*; do
                [ -b "/dev/${path##*/}" ] && echo "/dev/${path##*/}" && return 0
            done
        done
    done
    return 1
}

# The disk of the one session there is.
iscsi_disk() {
    local path
    for path in /sys/class/iscsi_session/session*/device/target*/*/block/*; do
        [ -e "$path" ] && [ -b "/dev/${path##*/}" ] && echo "/dev/${path##*/}" && return 0
    done
    return 1
}

iscsi_logout() {
    iscsiadm -m node -T "$TARGET" -p "$PORTAL" --logout
}

# ---- dm-multipath over iSCSI ------------------------------------------------------------------------------------------

start_udev() {
    mkdir -p /run/udev
    /lib/systemd/systemd-udevd --daemon
    udevadm trigger
    udevadm settle -t 20
}

# start_multipathd [SELECTOR]: how it chooses among paths that are as good as each other.
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
        path_selector "${1:-service-time 0}"
        prio alua
        hardware_handler "1 alua"
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

# A portal that SendTargets has told of has a record already: a second one would log in twice.
iscsi_login_everywhere() {
    local portal
    for portal in $PORTALS; do
        iscsiadm -m node -T "$TARGET" -p "$portal" > /dev/null 2>&1 \
            || iscsiadm -m node -o new -T "$TARGET" -p "$portal"
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
    [ "$(multipath -ll | grep -c 'active  *ready  *running')" = "$1" ]
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

# ---- Copies by the disk -----------------------------------------------------------------------------------------------

# Whether the disk copies by itself (3PC). Not every server that these scripts run against does.
copies_itself() {
    sg_inq "$1" | grep -q '3PC=1'
}

network_bytes() {
    cat /sys/class/net/[ev]*/statistics/[rt]x_bytes | awk '{ sum += $1 } END { printf "%d", sum }'
}

# copied_there DISK MEGABYTES: EXTENDED COPY to another place of the disk. The network carries the commands, not the data.
copied_there() {
    local block count generic moved
    generic=/dev/$(ls "/sys/block/${1##*/}/device/scsi_generic")
    block=$(cat "/sys/block/${1##*/}/queue/logical_block_size")
    count=$(($2 * 1048576 / block))
    dd if=/dev/urandom of="$1" bs=1M count="$2" oflag=direct conv=fsync status=none
    moved=$(network_bytes)
    sg_xcopy if="$generic" of="$generic" bs="$block" bpt=8192 count=$count seek=$((2 * count))
    moved=$(($(network_bytes) - moved))
    echo "$moved bytes moved"
    [ $moved -lt 65536 ]
    dd if="$1" bs=1M count="$2" skip=$((2 * $2)) iflag=direct status=none > /run/copy
    dd if="$1" bs=1M count="$2" iflag=direct status=none | cmp - /run/copy
    rm /run/copy
}

# ---- NVMe/TCP --------------------------------------------------------------------------------------------------------

nvme_discover() {
    nvme discover -t tcp -a "$ADDRESS" -s "$DISCOVERY_PORT" --hostnqn "$HOSTNQN" --hostid "$HOSTID" | tee /run/discovered
    grep -q "subnqn: *$SUBSYSTEM\$" /run/discovered
}

# nvme_connect_to PORTAL OPTION...: to the subsystem through one of its nodes, for good. `nvme_program` names another nvme-cli.
nvme_connect_to() {
    local portal=$1
    shift
    "${nvme_program[@]:-nvme}" connect -t tcp -a "${portal%:*}" -s "${portal#*:}" -n "$SUBSYSTEM" --hostnqn "$HOSTNQN" \
        --hostid "$HOSTID" --reconnect-delay 1 --ctrl-loss-tmo -1 "$@"
}

# nvme_connect_everywhere OPTION...: through each of PORTALS.
nvme_connect_everywhere() {
    local portal
    for portal in $PORTALS; do
        nvme_connect_to "$portal" "$@" || return 1
    done
}

# nvme_refused OPTION...: the host does not come in so, at any node.
nvme_refused() {
    local portal
    for portal in $PORTALS; do
        ! nvme_connect_to "$portal" "$@" || return 1
    done
    nvme_paths_are || { nvme list-subsys; return 1; }
}

# nvme_paths_are STATE...: of the controllers that there are.
nvme_paths_are() {
    local controller found=()
    for controller in /sys/class/nvme/nvme*; do
        grep -qsx "$SUBSYSTEM" "$controller/subsysnqn" && found+=("$(cat "$controller/state")")
    done
    [ "${found[*]}" = "$*" ]
}

nvme_disconnect_everywhere() {
    nvme disconnect -n "$SUBSYSTEM"
    try 10 nvme_paths_are
}

# verified_load DISK SEED BLOCK_SIZE DEPTH: a range written at an even rate, and read back.
verified_load() {
    fio --name=load --filename="$1" --size="${MEGABYTES}M" --rw=randwrite --bs="$3" --iodepth="$4" --rate_iops=300 --randseed="$2" \
        --ioengine=libaio --direct=1 --verify=crc32c --verify_pattern="$2" --do_verify=1 --verify_fatal=1 > "/run/fio.$2" 2>&1 ||
        { cat "/run/fio.$2"; return 1; }
}

# nvme_connect [OPTION...]: --hdr-digest, --data-digest, --nr-io-queues, …
nvme_connect() {
    nvme connect -t tcp -a "$ADDRESS" -s "$IO_PORT" -n "$SUBSYSTEM" --hostnqn "$HOSTNQN" --hostid "$HOSTID" \
        --keep-alive-tmo 5 --reconnect-delay 1 --ctrl-loss-tmo 60 "$@"
    try 10 nvme_disk
}

nvme_disk() {
    local path
    for path in /sys/class/nvme-subsystem/*/nvme*n*; do
        [ -b "/dev/${path##*/}" ] || continue
        grep -qx "$SUBSYSTEM" "${path%/*}/subsysnqn" && echo "/dev/${path##*/}" && return 0
    done
    return 1
}

nvme_controller() {
    local path
    for path in /sys/class/nvme/nvme*; do
        grep -qx "$SUBSYSTEM" "$path/subsysnqn" && echo "/dev/${path##*/}" && return 0
    done
    return 1
}

nvme_disconnect() {
    nvme disconnect -n "$SUBSYSTEM"
}

# ---- Load while a node is in trouble -----------------------------------------------------------------------------------

# steady_load DISK: verified writes at an even rate (RATE a second), one fio after the other, until there is /run/stop; of the
# first MiB, or LOAD_MIB behind the first LOAD_AT_MIB.
steady_load() {
    while [ ! -e /run/stop ]; do
        fio --name=load --filename="$1" --offset="${LOAD_AT_MIB:-0}M" --size="${LOAD_MIB:-1}M" --rw=randwrite --bs=4k --iodepth=4 \
            --rate_iops="$RATE" --ioengine=libaio --direct=1 --verify=crc32c --do_verify=1 --verify_fatal=1 --output-format=terse \
            > /run/fio.load 2>&1 || return 1
        awk -F';' 'NF > 100 { print $80 / 1e3 }' /run/fio.load >> /run/longest
    done
}

# under_trouble SIGN DISK GONE BACK: DISK is written while the host brings a trouble to a node. GONE NODE says that the node's path
# is not used any more, BACK NODE that all are used again; the load sees no error, and no pause above what the host allows.
#
# The file `SIGN-go` in the share asks the host for the trouble, which answers by `SIGN-down`: the number of the node among PORTALS,
# and the longest pause in milliseconds. `SIGN-seen` asks for its end, answered by `SIGN-up`. With `SIGN-back` the host looks whether
# each node has the connections that it had before, and no more, and makes `SIGN-over`.
under_trouble() {
    local name=$1 sign="$GUEST_SHARE/$1" disk=$2 gone=$3 back=$4 node allowed load
    rm -f /run/stop /run/longest
    steady_load "$disk" &
    load=$!
    sleep 0.5
    touch "$sign-go"
    try 60 test -e "$sign-down"
    read -r node allowed < "$sign-down"
    "$gone" "$node"
    kill -0 $load || { cat /run/fio.load; return 1; }
    touch "$sign-seen"
    try 120 test -e "$sign-up"
    "$back" "$node"
    touch "$sign-back" /run/stop
    wait $load || { cat /run/fio.load; return 1; }
    no_pause "${name//-/ }" "$allowed"
    try 60 test -e "$sign-over" || { echo "connections are left at a node, or missing"; return 1; }
}

# no_pause NAME MILLISECONDS: the longest write of a load took no longer.
no_pause() {
    awk -v limit="$2" -v share="$GUEST_SHARE" -v name="$1" '
        $1 > longest { longest = $1 }
        END {
            printf "note\t%s: the longest write took %.2f s\n", name, longest / 1e3 >> (share "/report")
            exit NR == 0 || longest > limit
        }' /run/longest || { echo "a write took longer than $2 ms"; return 1; }
}

# used DISK...: writes go through each of these.
used() {
    local disk before=()
    for disk; do before+=("$(written "$disk")"); done
    sleep 1
    for disk; do
        [ "$(written "$disk")" -gt "${before[0]}" ] || { echo "nothing goes through $disk"; return 1; }
        before=("${before[@]:1}")
    done
}

written() {
    awk '{ print $5 }' "/sys/block/$1/stat"
}

# ---- the same for every disk -------------------------------------------------------------------------------------------

fio_quiet() {
    fio --output-format=terse --verify_fatal=1 --ioengine=libaio --direct=1 "$@" > /run/fio.out || {
        cat /run/fio.out
        return 1
    }
}

make_file_system() {
    case $1 in
    ext4) mkfs.ext4 -q -F "$2" ;;
    xfs) mkfs.xfs -q -f "$2" ;;
    esac
}

file_system_clean() {
    case $1 in
    ext4) fsck.ext4 -fn "$2" ;;
    xfs) xfs_repair -n "$2" ;;
    esac
}

# file_system_life KIND DISK MEGABYTES: made, written with mixed sizes and verified, unmounted, verified again after a new mount,
# trimmed, verified once more, and clean at the end.
file_system_life() {
    local kind=$1 disk=$2 size=$3 job
    job=(--name=file --directory=/run/mnt --size="${size}M" --rw=randwrite --bsrange=4k-128k --iodepth=16 --verify=crc32c)
    modules "$kind"
    mkdir -p /run/mnt
    trap 'mountpoint -q /run/mnt && umount /run/mnt' EXIT
    make_file_system "$kind" "$disk"
    mount -t "$kind" "$disk" /run/mnt
    fio_quiet "${job[@]}" --do_verify=1
    dd if=/dev/urandom of=/run/mnt/gone bs=1M count=8 conv=fsync status=none
    umount /run/mnt
    mount -t "$kind" "$disk" /run/mnt
    fio_quiet "${job[@]}" --verify_only
    rm /run/mnt/gone
    sync
    fstrim -v /run/mnt
    echo 3 > /proc/sys/vm/drop_caches
    fio_quiet "${job[@]}" --verify_only
    umount /run/mnt
    file_system_clean "$kind" "$disk"
}

# raw_life DISK MEGABYTES: verified writes of mixed sizes at depth, while the range behind them is discarded in random order and
# then reads as zeroes.
raw_life() {
    local bytes=$(($2 << 20))
    dd if=/dev/urandom of="$1" bs=1M count="$2" seek="$2" oflag=direct conv=fsync status=none
    fio_quiet --filename="$1" --size=$bytes \
        --name=write --rw=randwrite --bsrange=4k-64k --iodepth=32 --verify=crc32c --verify_backlog=128 \
        --name=discard --rw=randtrim --bs=64k --offset=$bytes --iodepth=4
    dd if="$1" bs=1M count="$2" skip="$2" iflag=direct status=none | cmp -n $bytes - /dev/zero
}

# discard_all DISK: what was there reads as zeroes afterwards.
discard_all() {
    dd if=/dev/urandom of="$1" bs=1M count=8 oflag=direct conv=fsync status=none
    blkdiscard "$1"
    dd if="$1" bs=1M count=64 iflag=direct status=none | cmp -n $((64 << 20)) - /dev/zero
}

# mark DISK, marked DISK: a pattern that must survive what happens in between.
mark() {
    head -c 4M /dev/urandom > /run/mark
    dd if=/run/mark of="$1" bs=1M oflag=direct conv=fsync status=none
}

marked() {
    dd if="$1" bs=1M count=4 iflag=direct status=none | cmp - /run/mark
}
