#!/bin/bash
# The kernel's NVMe/TCP initiator. From the order: ADDRESS, DISCOVERY_PORT, IO_PORT, SUBSYSTEM, HOSTNQN, HOSTID, DIGESTS (off on),
# MEGABYTES, KINDS (file systems). With STAND_IN=nvmet the guest serves the subsystem itself: shows that the script, not
# the product, is at fault.
. "${0%/*}/lib.sh"

options() {
    case $1 in
    on) echo --hdr-digest --data-digest ;;
    off) ;;
    esac
}

# What the Linux kernel believes of the controller and the namespace.
identity() {
    nvme id-ctrl "$(nvme_controller)" | tee /run/controller
    grep -q "^subnqn *: $SUBSYSTEM\$" /run/controller
    nvme id-ns "$(nvme_disk)" | tee /run/namespace
    grep -q "in use" /run/namespace
    grep -Eq '^(uuid|eui)\.' "/sys/block/$(basename "$(nvme_disk)")/wwid"
    nvme list | grep -q "$(nvme_disk)"
}

# Commands that file systems seldom send, four kilobytes at a time.
commands() {
    local disk blocks range
    disk=$(nvme_disk)
    blocks=$((4096 / $(cat "/sys/block/${disk##*/}/queue/logical_block_size")))
    range=(--start-block=$blocks --block-count=$((blocks - 1)))
    nvme flush "$disk"
    head -c 4096 /dev/urandom > /run/block
    nvme write "$disk" "${range[@]}" --data-size=4096 --data=/run/block
    nvme read "$disk" "${range[@]}" --data-size=4096 --data=/run/back
    cmp /run/block /run/back
    if [ "${STAND_IN:-}" != nvmet ]; then # which has no Copy
        nvme copy "$disk" --sdlba=$((3 * blocks)) --slbs=$blocks,$blocks --blocks=$((blocks - 1)),$((blocks - 1))
        nvme read "$disk" --start-block=$((4 * blocks)) --block-count=$((blocks - 1)) --data-size=4096 --data=/run/back
        cmp /run/block /run/back
    fi
    if [ "${STAND_IN:-}" != nvmet ]; then # whose file is on tmpfs, which cannot zero a range
        nvme write-zeroes "$disk" "${range[@]}"
        nvme read "$disk" "${range[@]}" --data-size=4096 --data=/run/back
        cmp -n 4096 /run/back /dev/zero
    fi
    nvme dsm "$disk" --ad --slbs=$blocks --blocks=$blocks
}

again() {
    mark "$(nvme_disk)"
    nvme_disconnect
    # shellcheck disable=SC2046
    nvme_connect $(options "$1")
    marked "$(nvme_disk)"
}

stand_in() {
    modules nvmet nvmet-tcp
    local c=/sys/kernel/config/nvmet s
    s=$c/subsystems/$SUBSYSTEM
    mkdir "$s" "$s/namespaces/1" "$c/ports/1"
    echo 1 > "$s/attr_allow_any_host"
    truncate -s 512M /run/disk
    echo -n /run/disk > "$s/namespaces/1/device_path"
    echo 1 > "$s/namespaces/1/buffered_io"
    echo 1 > "$s/namespaces/1/enable"
    echo tcp > "$c/ports/1/addr_trtype"
    echo ipv4 > "$c/ports/1/addr_adrfam"
    echo "$ADDRESS" > "$c/ports/1/addr_traddr"
    echo "$IO_PORT" > "$c/ports/1/addr_trsvcid"
    ln -s "$s" "$c/ports/1/subsystems/$SUBSYSTEM"
}

modules nvme-core nvme-tcp crc32c
if [ "${STAND_IN:-}" = nvmet ]; then must "NVMe/TCP: the kernel's own target" stand_in; fi
must "NVMe/TCP: discovery names the subsystem" nvme_discover
for digest in $DIGESTS; do
    # shellcheck disable=SC2046
    must "NVMe/TCP, digests $digest: connect" nvme_connect $(options "$digest")
    disk=$(nvme_disk)
    check "NVMe/TCP, digests $digest: identify controller and namespace" identity
    check "NVMe/TCP, digests $digest: flush, write, read, copy, write zeroes, deallocate" commands
    for kind in $KINDS; do
        check "NVMe/TCP, digests $digest: $kind, written, remounted, trimmed, clean" file_system_life "$kind" "$disk" "$MEGABYTES"
    done
    check "NVMe/TCP, digests $digest: mixed writes and discards verified" raw_life "$disk" "$MEGABYTES"
    check "NVMe/TCP, digests $digest: a discarded disk reads as zeroes" discard_all "$disk"
    check "NVMe/TCP, digests $digest: data survives disconnect and connect" again "$digest"
    check "NVMe/TCP, digests $digest: disconnect" nvme_disconnect
done
exit "${checks_failed:-0}"
