#!/bin/bash
# What the kernel and sg3-utils leave to a disk of two nodes: UNMAP, WRITE SAME, COMPARE AND WRITE, EXTENDED COPY. What is done at node
# a is read at node b, and the space that both copies take is looked up there. From the order: PORTALS (ADDRESS:PORT of each node),
# TARGET and CLONE (thin volumes), INITIATOR, COPIED_GIB with EXTENTS times EXTENT_MIB of data in them, SLACK (bytes).
#
# A file `space-N-master` or `space-N-clone` in the share asks how many bytes of data the copies of that volume take; the host answers
# with `told-N`, a number for each node.
. "${0%/*}/lib.sh"

MIB=$((1 << 20))
read -r FIRST SECOND <<< "$PORTALS"

login_everywhere() {
    local target portal
    for target in "$TARGET" "$CLONE"; do
        for portal in $PORTALS; do
            iscsiadm -m node -o new -T "$target" -p "$portal"
            iscsiadm -m node -T "$target" -p "$portal" --login
            try 10 session_disk targetname "$target" "$portal"
        done
    done
}

generic() {
    echo "/dev/$(ls "/sys/block/${1##*/}/device/scsi_generic")"
}

# space VOLUME: what its copies take.
space() {
    local n=1
    while [ -e "$GUEST_SHARE/told-$n" ]; do n=$((n + 1)); done
    : > "$GUEST_SHARE/space-$n-$1"
    try 20 test -e "$GUEST_SHARE/told-$n"
    cat "$GUEST_SHARE/told-$n"
}

# takes VOLUME BYTES: so much, or a little more.
takes() {
    local of
    for of in $(space "$1"); do
        echo "$1 takes $of bytes, of $2"
        [ "$of" -ge "$2" ] && [ "$of" -le $(($2 + SLACK)) ] || return 1
    done
}

# random DISK AT COUNT: data, in MiB; what it was stays in /run/data.
random() {
    dd if=/dev/urandom of=/run/data bs=$MIB count="$3" status=none
    dd if=/run/data of="$1" bs=$MIB seek="$2" oflag=direct conv=fsync status=none
}

# is_zero DISK AT COUNT, in MiB
is_zero() {
    dd if="$1" bs=$MIB skip="$2" count="$3" iflag=direct status=none | cmp -n $(($3 * MIB)) - /dev/zero
}

# holds DISK AT COUNT: what /run/data has there, in MiB
holds() {
    dd if="$1" bs=$MIB skip="$2" count="$3" iflag=direct status=none > /run/found
    dd if=/run/data bs=$MIB skip="$2" count="$3" status=none | cmp - /run/found
    rm /run/found
}

unmap() {
    random "$clone_a" 0 64
    try 10 takes clone $((64 * MIB))
    blkdiscard -o $((16 * MIB)) -l $((32 * MIB)) "$clone_a"
    try 10 takes clone $((32 * MIB))
    holds "$clone_b" 0 16
    is_zero "$clone_b" 16 32
    holds "$clone_b" 48 16
}

write_same() {
    random "$clone_a" 0 64
    try 10 takes clone $((64 * MIB))
    # The kernel, for zeroes; and by hand, with UNMAP, both lengths.
    blkdiscard -z -o 0 -l $((8 * MIB)) "$clone_a"
    sg_write_same --10 --unmap --lba=$((16 * MIB / block)) --num=$((8 * MIB / block)) --xferlen="$block" --in=/dev/zero "$(generic "$clone_a")"
    sg_write_same --16 --unmap --lba=$((32 * MIB / block)) --num=$((8 * MIB / block)) --xferlen="$block" --in=/dev/zero "$(generic "$clone_a")"
    try 10 takes clone $((40 * MIB))
    is_zero "$clone_b" 0 8
    holds "$clone_b" 8 8
    is_zero "$clone_b" 16 8
    holds "$clone_b" 24 8
    is_zero "$clone_b" 32 8
    holds "$clone_b" 40 24
    # A block of data, many times.
    dd if=/run/data of=/run/block bs="$block" count=1 status=none
    sg_write_same --16 --lba=$((48 * MIB / block)) --num=$((MIB / block)) --xferlen="$block" --in=/run/block "$(generic "$clone_a")"
    cp /run/block /run/expected
    while [ "$(stat -c %s /run/expected)" -lt $MIB ]; do
        cat /run/expected /run/expected > /run/twice
        mv /run/twice /run/expected
    done
    dd if="$clone_b" bs=$MIB skip=48 count=1 iflag=direct status=none | cmp - /run/expected
}

# swap DISK: COMPARE AND WRITE of /run/before by /run/after, in block 5.
swap() {
    cat /run/before /run/after > /run/both
    sg_compare_and_write --in=/run/both --lba=5 --num=1 --xferlen=$((2 * block)) "$(generic "$1")"
}

sixth_block() {
    dd if="$1" bs="$block" skip=5 count=1 iflag=direct status=none
}

# Two hosts take a lock by turns, as ESXi's do: one at each node.
compare_and_write() {
    local turn status disk other
    sixth_block "$clone_a" > /run/before
    for turn in $(seq 10); do
        disk=$clone_a other=$clone_b
        [ $((turn % 2)) = 0 ] || { disk=$clone_b other=$clone_a; }
        head -c "$block" /dev/urandom > /run/after
        swap "$disk"
        sixth_block "$other" | cmp - /run/after
        # Who still believes in the old one does not get it: MISCOMPARE, sg3-utils' 14.
        status=0
        swap "$other" || status=$?
        equal $status 14 "of a COMPARE AND WRITE of what is no longer there"
        sixth_block "$disk" | cmp - /run/after
        mv /run/after /run/before
    done
}

# A file system gives back what a file has taken.
file_system_frees() {
    local before after
    blkdiscard -f "$clone_a"
    modules ext4
    mkdir -p /run/mnt
    mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 "$clone_a"
    mount "$clone_a" /run/mnt
    trap 'mountpoint -q /run/mnt && umount /run/mnt' EXIT
    dd if=/dev/urandom of=/run/mnt/file bs=$MIB count=128 conv=fsync status=none
    read -r before _ <<< "$(space clone)"
    rm /run/mnt/file
    sync
    fstrim -v /run/mnt
    for after in $(space clone); do
        echo "$before bytes before, $after after"
        [ $((after + 120 * MIB)) -le "$before" ]
    done
    umount /run/mnt
}

everything_is_freed() {
    blkdiscard -f "$clone_b"
    try 10 takes clone 0
    is_zero "$clone_a" 0 64
}

prepare_master() {
    local n stride=$((COPIED_GIB * 1024 / EXTENTS))
    for n in $(seq 0 $((EXTENTS - 1))); do
        dd if=/dev/urandom of="$master_a" bs=$MIB count="$EXTENT_MIB" seek=$((n * stride)) oflag=direct status=none
    done
    sync "$master_a"
    try 10 takes master $((EXTENTS * EXTENT_MIB * MIB))
}

# What a hypervisor does to clone a disk.
extended_copy() {
    local moved begun
    # udev looks at a disk that was written to: it reads.
    udevadm settle -t 20
    begun=$EPOCHREALTIME
    moved=$(network_bytes)
    sg_xcopy if="$(generic "$master_a")" of="$(generic "$clone_a")" bs="$block" bpt=65535 count=$((COPIED_GIB * 1024 * MIB / block))
    moved=$(($(network_bytes) - moved))
    printf 'note\t%s GiB copied in %s s; %s bytes over the network of the client\n' "$COPIED_GIB" "$(seconds_since "$begun")" "$moved" \
        >> "$GUEST_SHARE/report"
    # 321 commands and answers.
    [ "$moved" -lt $((MIB / 4)) ]
    try 10 takes clone $((EXTENTS * EXTENT_MIB * MIB))
}

must "udev" start_udev
must "iscsid" start_iscsid
must "two volumes, each through both nodes" login_everywhere
master_a=$(session_disk targetname "$TARGET" "$FIRST")
clone_a=$(session_disk targetname "$CLONE" "$FIRST")
clone_b=$(session_disk targetname "$CLONE" "$SECOND")
block=$(cat "/sys/block/${clone_a##*/}/queue/logical_block_size")
check "UNMAP (blkdiscard): space is free at both nodes, zeroes are read at the other" unmap
check "WRITE SAME(10) and (16), with UNMAP and without: the same" write_same
check "COMPARE AND WRITE: one of two hosts at two nodes wins, each time" compare_and_write
check "a file system frees what a file took (fstrim)" file_system_frees
check "all is discarded: no space is taken" everything_is_freed
must "$((EXTENTS * EXTENT_MIB)) MiB of data in $COPIED_GIB GiB" prepare_master
check "EXTENDED COPY of $COPIED_GIB GiB: no data over the network of the client, no more space than the data" extended_copy
exit "${checks_failed:-0}"
