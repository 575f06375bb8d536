#!/bin/bash
# A machine whose firmware, loader, kernel and files come from a disk that is lent to it (vhost-user-blk). From the order: SERIAL (what
# its serial number begins with), DOOR (who lends it), MEGABYTES.
. "${0%/*}/lib.sh"

root_is_lent() {
    grep -q "^$SERIAL" /sys/block/vda/serial
    equal "$(awk '$2 == "/" { print $1, $3 }' /proc/mounts)" "/dev/vda1 ext4" "the root"
}

mount_data() {
    mount -t xfs /dev/vda2 /xfs
}

# A verified load on both file systems.
load() {
    mkdir -p /load
    fio_quiet --size=$((MEGABYTES << 20)) --rw=randwrite --bsrange=4k-128k --iodepth=16 --fsync=64 \
        --loops=200 --verify=crc32c --verify_backlog=64 --time_based --runtime=12 \
        --name=root --directory=/load --name=data --directory=/xfs
}

# Programs are read from the disk meanwhile.
read_programs() {
    echo 3 > /proc/sys/vm/drop_caches
    busybox md5sum /bin/* /boot/* > "/run/sums-$1"
}

end_in_order() {
    umount /xfs
    mount -o remount,ro /
}

must "$DOOR: the machine has booted from it" root_is_lent
must "$DOOR: its other file system is there" mount_data
check "$DOOR: all programs can be read" read_programs before
check "$DOOR: its node's peer dies under load" meanwhile step-1 back-1 load
check "$DOOR: its node's peer dies under load, once more" meanwhile step-2 back-2 load
check "$DOOR: all programs are what they were" read_programs after
check "$DOOR: not a byte of them has changed" cmp /run/sums-before /run/sums-after
if dmesg | grep -E "I/O error|EXT4-fs error|XFS .*(rror|orrupt)|virtio_blk.*(timed|reset)"; then
    check "$DOOR: no request has failed" false
fi
check "$DOOR: the machine ends in order" end_in_order
exit "${checks_failed:-0}"
