#!/bin/bash
# The kernel's iSCSI initiator. From the order: PORTAL, TARGET, INITIATOR, DIGESTS, MEGABYTES, KINDS (file systems).
. "${0%/*}/lib.sh"

again() {
    mark "$(iscsi_disk)"
    iscsi_logout
    iscsi_login "$1"
    marked "$(iscsi_disk)"
}

must "iSCSI: iscsid" start_iscsid
must "iSCSI: SendTargets names the target" iscsi_discover
for digest in $DIGESTS; do
    must "iSCSI, digest $digest: login" iscsi_login "$digest"
    disk=$(iscsi_disk)
    for kind in $KINDS; do
        check "iSCSI, digest $digest: $kind, written, remounted, trimmed, clean" file_system_life "$kind" "$disk" "$MEGABYTES"
    done
    check "iSCSI, digest $digest: mixed writes and discards verified" raw_life "$disk" "$MEGABYTES"
    if copies_itself "$disk"; then
        check "iSCSI, digest $digest: EXTENDED COPY moves no data over the network" copied_there "$disk" "$MEGABYTES"
    fi
    check "iSCSI, digest $digest: a discarded disk reads as zeroes" discard_all "$disk"
    check "iSCSI, digest $digest: data survives logout and login" again "$digest"
    check "iSCSI, digest $digest: logout" iscsi_logout
done
exit "${checks_failed:-0}"
