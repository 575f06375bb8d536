#!/bin/bash
# A file system that was copied onto a volume, read through both kernel initiators one after the other: every file's checksum.
# From the order: as for iscsi.sh and nvme.sh, and SUMS, a file in the share, and FILES, how many it names.
. "${0%/*}/lib.sh"

verify() {
    local disk=$1
    modules ext4
    mkdir -p /run/mnt
    mount -t ext4 -o ro "$disk" /run/mnt
    equal "$(wc -l < "$GUEST_SHARE/$SUMS")" "$FILES" "files named"
    (cd /run/mnt && sha256sum --check --quiet --strict "$GUEST_SHARE/$SUMS")
    umount /run/mnt
}

modules nvme-core nvme-tcp crc32c
check "NVMe/TCP: connect" nvme_connect || exit 1
check "NVMe/TCP: mounted, $FILES files have their checksums" verify "$(nvme_disk)"
check "NVMe/TCP: disconnect" nvme_disconnect
check "iSCSI: iscsid" start_iscsid || exit 1
check "iSCSI: SendTargets names the target" iscsi_discover || exit 1
check "iSCSI: login" iscsi_login CRC32C || exit 1
check "iSCSI: mounted, $FILES files have their checksums" verify "$(iscsi_disk)"
check "iSCSI: logout" iscsi_logout
exit "${checks_failed:-0}"
