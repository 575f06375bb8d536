#!/bin/bash
# A volume as a block device of this machine (`windrose attach --ublk`), of a node on the host. From the order: PROGRAM, API, TOKEN_FILE
# and CA_CERT (files in the share), VOLUME, MEGABYTES, BYTES (the volume's size), KINDS (file systems), DEATHS (how often the process dies).
. "${0%/*}/lib.sh"

export WINDROSE_API=$API WINDROSE_CA_CERT=$GUEST_SHARE/$CA_CERT WINDROSE_TOKEN_FILE=/run/token
HOST=(--host-nqn nqn.2026-01.net.example:ublk --host-id 00000000-0000-4000-8000-000000000006)
disk=/run/windrose/disks/$VOLUME

# begin [OPTION...]: serves the volume; there is a device when this returns.
begin() {
    # Here and not by the process, which may come after the first look: the last one's log says what is looked for.
    : > /run/attach.log
    "$PROGRAM" attach "$VOLUME" --ublk --queues 4 --no-path-timeout 3 "${HOST[@]}" "$@" > /run/attach.log 2>&1 &
    echo $! > /run/attach.pid
    try 20 grep -q "serving the volume" /run/attach.log || {
        cat /run/attach.log
        return 1
    }
}

# ends STATUS: it ends by itself, or has been told to.
ends() {
    local pid
    pid=$(cat /run/attach.pid)
    try 40 sh -c "! kill -0 $pid 2> /dev/null || grep -q '^State:.Z' /proc/$pid/status"
    cp /run/attach.log /run/attach.last
    [ ! -e "/proc/$pid" ] || grep -q '^State:.Z' "/proc/$pid/status"
    grep -q "$1" /run/attach.log || {
        cat /run/attach.log
        return 1
    }
}

end() {
    kill "$(cat /run/attach.pid)"
    ends "everything that was written is durable"
}

device() {
    readlink "$disk"
}

# fails COMMAND...: `set -e` heeds it, as it does not heed a `!`.
fails() {
    ! "$@"
}

identity() {
    local queue
    queue=/sys/block/$(basename "$(device)")/queue
    equal "$(blockdev --getsize64 "$disk")" "$BYTES" "the size"
    equal "$(cat "$queue/logical_block_size")" 512 "block size"
    equal "$(cat "$queue/physical_block_size")" 4096 "physical block size"
    equal "$(cat "$queue/write_cache")" "write back" "the cache"
    equal "$(cat "$queue/fua")" 1 "FUA"
    equal "$(cat "$queue/max_hw_sectors_kb")" 1024 "the longest request in KiB"
    [ "$(cat "$queue/discard_max_bytes")" -gt 0 ]
    [ "$(cat "$queue/write_zeroes_max_bytes")" -gt 0 ]
    # One for each processor at most.
    [ "$(find "${queue%/queue}/mq" -mindepth 1 -maxdepth 1 | wc -l)" -le 4 ]
}

# What is in a request's flags arrives: a range is zeroed without being freed, and with.
zeroes() {
    dd if=/dev/urandom of="$disk" bs=1M count=4 oflag=direct conv=fsync status=none
    fallocate -z -l 2M "$disk"
    blkdiscard -z -o 2M -l 1M "$disk"
    dd if="$disk" bs=1M count=3 iflag=direct status=none | cmp -n $((3 << 20)) - /dev/zero
    ! dd if="$disk" bs=1M skip=3 count=1 iflag=direct status=none | cmp -s -n $((1 << 20)) - /dev/zero
}

no_second_one() {
    "$PROGRAM" attach "$VOLUME" --ublk "${HOST[@]}" > /run/second.log 2>&1 && return 1
    grep "already serves the volume as $(device)" /run/second.log
}

# under_load COMMAND...: it happens under a verified load, none of whose requests fails. Beside it something only writes: there are
# changes in flight at any moment, also while the other reads back.
under_load() {
    local load before bytes=$((MEGABYTES << 20))
    before=$(writes_completed)
    fio_quiet --filename="$disk" --size=$bytes --rw=randwrite --bsrange=4k-256k --loops=200 --time_based --runtime=12 \
        --name=death --iodepth=32 --verify=crc32c --verify_backlog=64 --verify_state_save=0 \
        --name=writes --iodepth=8 --offset=$bytes &
    load=$!
    try 60 are_written "$before"
    "$@"
    wait $load
}

# Killed while its node stands still, so that requests are in flight.
dies() {
    touch "$GUEST_SHARE/loaded-$1"
    try 20 test -e "$GUEST_SHARE/frozen-$1"
    kill -9 "$(cat /run/attach.pid)"
    touch "$GUEST_SHARE/killed-$1"
    try 20 test -e "$GUEST_SHARE/thawed-$1"
    begin
    grep "delaying writes" /run/attach.log || {
        cat /run/attach.log
        return 1
    }
}

# The node is away for longer than the process has patience.
out_of_reach() {
    touch "$GUEST_SHARE/gone"
    try 60 test -e "$GUEST_SHARE/killed-node"
    ends "volume $VOLUME cannot be reached"
    [ -b "$(device)" ]
    touch "$GUEST_SHARE/left"
    try 60 test -e "$GUEST_SHARE/back"
    begin
}

# Told to end while a file system is mounted: the device stays, and so does what is done to it.
ends_in_use() {
    local before writing
    mkdir -p /run/mnt
    make_file_system ext4 "$disk"
    mount "$disk" /run/mnt
    trap 'mountpoint -q /run/mnt && umount /run/mnt' EXIT
    before=$(device)
    head -c 4M /dev/urandom | tee /run/kept > /run/mnt/kept
    sync
    end
    grep "block device in use" /run/attach.log
    dd if=/dev/urandom of=/run/mnt/more bs=1M count=4 conv=fsync status=none &
    writing=$!
    sleep 1
    begin
    # Nothing was in doubt: nothing waits.
    fails grep "delaying writes" /run/attach.log
    wait $writing
    equal "$(device)" "$before" "the device"
    echo 3 > /proc/sys/vm/drop_caches
    cmp /run/kept /run/mnt/kept
    umount /run/mnt
    file_system_clean ext4 "$disk"
}

# Opened by a process, but not mounted: likewise.
ends_while_open() {
    sleep 60 < "$disk" &
    end
    grep "block device in use" /run/attach.log | grep "sleep ($!)"
    kill $!
    begin
}

is_removed() {
    local device
    device=$(device)
    end
    ! [ -e "$device" ] && ! [ -L "$disk" ] && ! [ -e "/sys/block/${device#/dev/}" ]
}

reads_only() {
    begin --read-only --device-id 7
    equal "$(device)" /dev/ublkb7 "the device"
    equal "$(blockdev --getro "$disk")" 1 "read-only"
    dd if="$disk" of=/dev/null bs=1M count=4 iflag=direct status=none
    fails dd if=/dev/zero of="$disk" bs=4k count=1 oflag=direct status=none
    is_removed
}

# Without a driver, or without the right, it says what is missing.
says_what_is_missing() {
    local control=/dev/ublk-control
    mv $control /run/control
    "$PROGRAM" attach "$VOLUME" --ublk "${HOST[@]}" > /run/missing.log 2>&1 && return 1
    mv /run/control $control
    cat /run/missing.log
    grep "modprobe ublk_drv" /run/missing.log
}

modules ublk_drv
cp "$GUEST_SHARE/$TOKEN_FILE" /run/token
check "ublk: without its driver it is said what is missing" says_what_is_missing
must "ublk: there is a block device" begin
check "ublk: size, blocks, cache, queues" identity
for kind in $KINDS; do
    check "ublk: $kind, written, remounted, trimmed, clean" file_system_life "$kind" "$disk" "$MEGABYTES"
done
check "ublk: mixed writes and discards verified" raw_life "$disk" "$MEGABYTES"
check "ublk: a discarded disk reads as zeroes" discard_all "$disk"
check "ublk: zeroes are written, in place and as holes" zeroes
check "ublk: no process serves it a second time" no_second_one
for ((n = 1; n <= DEATHS; n++)); do
    check "ublk: the process is killed under load, death $n" under_load dies $n
done
check "ublk: the volume is out of reach under load" under_load out_of_reach
check "ublk: told to end with a file system mounted, and gone on with" ends_in_use
check "ublk: told to end while a process has it open" ends_while_open
for kind in $KINDS; do
    check "ublk: $kind after all of that" file_system_life "$kind" "$disk" "$MEGABYTES"
done
check "ublk: told to end while it is unused, it is gone" is_removed
check "ublk: read-only, with a number" reads_only
if dmesg | grep "I/O error" | grep -v ublkb7; then
    check "ublk: no request has failed" false
fi
exit "${checks_failed:-0}"
