#!/bin/bash
# A disk that is lent to this machine by shared memory (vhost-user-blk). From the order: DOOR (by whom), SERIAL (what its serial number begins with),
# QUEUES, MEGABYTES, KINDS (file systems), DEATHS (how often the process that serves it dies), NODE_DEATHS (how often a node of the volume does).
. "${0%/*}/lib.sh"

lent_disk() {
    local path
    for path in /sys/block/vd*; do
        [ -b "/dev/${path##*/}" ] || continue
        grep -q "^$SERIAL" "$path/serial" && echo "/dev/${path##*/}" && return 0
    done
    return 1
}

# What the Linux kernel believes of the disk.
identity() {
    local queue=/sys/block/${disk##*/}/queue
    equal "$(cat "$queue/write_cache")" "write back" "the cache"
    equal "$(find "/sys/block/${disk##*/}/mq" -mindepth 1 -maxdepth 1 | wc -l)" "$QUEUES" "queues"
    equal "$(cat "$queue/logical_block_size")" 512 "block size"
    equal "$(cat "$queue/physical_block_size")" 4096 "physical block size"
    [ "$(cat "$queue/discard_max_bytes")" -gt 0 ]
    [ "$(cat "$queue/write_zeroes_max_bytes")" -gt 0 ]
}

# Without a cache a write is durable when it is done; the driver may choose.
cache_is_chosen() {
    local type=/sys/block/${disk##*/}/cache_type
    echo "write through" > "$type"
    equal "$(cat "$type")" "write through" "the cache"
    mark "$disk"
    echo "write back" > "$type"
    equal "$(cat "$type")" "write back" "the cache"
    marked "$disk"
}

# Requests wait while the process that serves them is away; none fails.
load() {
    fio_quiet --name=death --filename="$disk" --size=$((MEGABYTES << 20)) --rw=randwrite --bsrange=4k-256k --iodepth=32 \
        --loops=200 --verify=crc32c --verify_backlog=64 --time_based --runtime=12
}

modules virtio_blk
must "$DOOR: the disk is there" try 10 lent_disk
disk=$(lent_disk)
check "$DOOR: queues, sizes, cache" identity
for kind in $KINDS; do
    check "$DOOR: $kind, written, remounted, trimmed, clean" file_system_life "$kind" "$disk" "$MEGABYTES"
done
check "$DOOR: mixed writes and discards verified" raw_life "$disk" "$MEGABYTES"
check "$DOOR: a discarded disk reads as zeroes" discard_all "$disk"
check "$DOOR: with and without a cache" cache_is_chosen
for ((n = 1; n <= DEATHS; n++)); do
    check "$DOOR: the process that serves it dies under load, death $n" meanwhile "loaded-$n" "again-$n" load
done
for ((n = 1; n <= NODE_DEATHS; n++)); do
    check "$DOOR: a node of the volume dies under load, death $n" meanwhile "step-$n" "back-$n" load
done
if dmesg | grep -E "I/O error|virtio_blk.*(timed|reset)"; then
    check "$DOOR: no request has failed" false
fi
exit "${checks_failed:-0}"
