#!/bin/bash
# The kernel's NVMe/TCP initiator. From the order: ADDRESS, DISCOVERY_PORT, IO_PORT, SUBSYSTEM, HOSTNQN, HOSTID, DIGESTS (off on),
# MEGABYTES, KINDS (file systems), GROWN_MIB (what the volume grows to: `grow-1` in the share asks for it, the host answers by `grown-1`). With STAND_IN=nvmet the guest serves the subsystem itself: shows that the script, not
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
    if [ "${STAND_IN:-}" != nvmet ]; then # which has none of these
        nvme compare "$disk" "${range[@]}" --data-size=4096 --data=/run/block
        head -c 4096 /dev/zero > /run/other
        nvme compare "$disk" "${range[@]}" --data-size=4096 --data=/run/other > /run/compared 2>&1 && { echo "it compares equal"; return 1; }
        grep -qi "compare.failure" /run/compared || { cat /run/compared; return 1; }
        nvme verify "$disk" "${range[@]}"
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

# What the controller tells of itself: logs, and the features that it has.
tells() {
    local controller feature refused=
    controller=$(nvme_controller)
    nvme smart-log "$controller" | tee /run/smart
    grep -q '^critical_warning[[:space:]]*: 0$' /run/smart
    grep -q '^available_spare[[:space:]]*: 100%$' /run/smart
    nvme error-log "$controller" --log-entries=4
    nvme effects-log "$controller" --csi=0 | tee /run/effects
    grep -q '^IOCS25 .*Copy' /run/effects
    # nvme-cli reads all that there may be of it. One group of one namespace, optimized.
    nvme ana-log "$controller"
    nvme get-log "$controller" --log-id=0xc --log-len=52 --raw-binary > /run/ana
    equal "$(od -An -tu1 -j32 -N1 /run/ana | tr -d ' ')" 1 "access state"
    for feature in 0x1 0x2 0x4 0x6 0x7 0xa 0xb 0xf 0x16; do
        nvme get-feature "$controller" --feature-id=$feature || refused+=" $feature"
    done
    nvme get-feature "$controller" --feature-id=0x81 --cdw11=1 || refused+=" 0x81"
    for feature in 0x5 0x82 0x83; do
        nvme get-feature "$(nvme_disk)" --feature-id=$feature --namespace-id=1 || refused+=" $feature"
    done
    equal "$refused" "" "features that are refused"
}

# The same connection sees a larger disk, and writes to its end.
grows() {
    local disk before
    nvme_connect
    disk=$(nvme_disk)
    before=$(cat "$(nvme_controller | sed s:/dev:/sys/class/nvme:)/cntlid")
    touch "$GUEST_SHARE/grow-1"
    try 60 test -e "$GUEST_SHARE/grown-1"
    try 20 has_grown "$disk" || { cat "/sys/block/${disk##*/}/size"; return 1; }
    dd if=/run/block of="$disk" bs=4096 seek=$((GROWN_MIB * 256 - 1)) oflag=direct status=none
    equal "$(cat "$(nvme_controller | sed s:/dev:/sys/class/nvme:)/cntlid")" "$before" "controller"
    nvme_disconnect
}

has_grown() {
    [ "$(cat "/sys/block/${1##*/}/size")" = $((GROWN_MIB * 2048)) ]
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
    if [ "${STAND_IN:-}" != nvmet ]; then check "NVMe/TCP, digests $digest: logs and features" tells; fi # which has fewer
    check "NVMe/TCP, digests $digest: flush, write, read, compare, verify, copy, write zeroes, deallocate" commands
    for kind in $KINDS; do
        check "NVMe/TCP, digests $digest: $kind, written, remounted, trimmed, clean" file_system_life "$kind" "$disk" "$MEGABYTES"
    done
    check "NVMe/TCP, digests $digest: mixed writes and discards verified" raw_life "$disk" "$MEGABYTES"
    check "NVMe/TCP, digests $digest: a discarded disk reads as zeroes" discard_all "$disk"
    check "NVMe/TCP, digests $digest: data survives disconnect and connect" again "$digest"
    check "NVMe/TCP, digests $digest: disconnect" nvme_disconnect
done
if [ -n "${GROWN_MIB:-}" ]; then check "NVMe/TCP: a volume that grows is a larger disk" grows; fi
exit "${checks_failed:-0}"
