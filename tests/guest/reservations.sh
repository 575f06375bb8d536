#!/bin/bash
# Persistent reservations of one volume of two nodes, by two hosts with a path through each node: what Windows' cluster validation
# asks, what fence_scsi does, and what outlives a loss of power. From the order: PORTALS (ADDRESS:PORT of each node), TARGET,
# INITIATOR (the hosts are INITIATOR1 and INITIATOR2).
#
# Each step that changes something makes a file `step-N` in the share when it begins: the host kills a node then, and makes `back-N`
# when all is well again. `operator-wanted` asks for `windrose volume reservations --clear`, answered by `operator-done`. `dark-1` and `dark-2` ask for the loss of all nodes at once, answered by `light-1` and `light-2`.
. "${0%/*}/lib.sh"

read -r FIRST SECOND <<< "$PORTALS"
KEY=([1]=0xa1 [2]=0xb2)

# portal NODE
portal() {
    if [ "$1" = a ]; then echo "$FIRST"; else echo "$SECOND"; fi
}

login_hosts() {
    local host node
    for host in 1 2; do
        iscsiadm -m iface -I host$host -o new
        iscsiadm -m iface -I host$host -o update -n iface.initiatorname -v "$INITIATOR$host"
        iscsiadm -m iface -I host$host -o update -n iface.transport_name -v tcp
        for node in a b; do
            iscsiadm -m node -o new -T "$TARGET" -p "$(portal $node)" -I host$host
            iscsiadm -m node -T "$TARGET" -p "$(portal $node)" -I host$host --login
        done
    done
    for host in 1 2; do
        for node in a b; do try 10 disk $host $node; done
    done
}

# disk HOST NODE: the disk of this host's session with this node.
disk() {
    session_disk initiatorname "$INITIATOR$1" "$(portal "$2")"
}

# persist HOST NODE OPTION...: once more if the unit had something to tell first. sg_persist ends with 0 also where the path was
# lost, and says no more than which status the host gave it.
persist() {
    local disk status lost
    disk=$(disk "$1" "$2") || return 1
    shift 2
    for _ in 1 2 3 4; do
        status=0
        timeout 8 sg_persist --no-inquiry --verbose "$@" "$disk" > /run/persist 2>&1 || status=$?
        if [ $status = 0 ]; then
            lost=$(grep -i -m 1 "host_status\|transport" /run/persist) || return 0
            printf 'note\tsg_persist ended with 0, and: %s\n' "$lost" >> "$GUEST_SHARE/report"
            return 1
        fi
        grep -qi "unit attention" /run/persist || return 1
    done
    return 1
}

# out HOST OPTION...: through whichever node answers, at first the one that the step is about.
out() {
    local host=$1 end=$((SECONDS + 40)) node
    shift
    while [ $SECONDS -lt $end ]; do
        for node in $through; do
            persist "$host" $node --out "$@" && return 0
        done
        sleep 0.2
    done
    cat /run/persist
    return 1
}

# keys NODE: the registered keys, each once, as one of the hosts reads them there.
keys() {
    persist 1 "$1" --in --read-keys || return 1
    grep -o "0x[0-9a-f]*$" /run/persist | sort -u | tr '\n' ' '
}

# keys_are KEY...: at both nodes.
keys_are() {
    local node
    for node in a b; do
        equal "$(keys $node)" "$(printf '%s ' "$@" | sed 's/^ $//')" "keys at node $node"
    done
}

# held_by KEY TYPE: the reservation, at both nodes.
held_by() {
    local node
    for node in a b; do
        persist 2 $node --in --read-reservation
        grep -q "Key=$1" /run/persist || { cat /run/persist; return 1; }
        grep -q "type: $2" /run/persist || { cat /run/persist; return 1; }
    done
}

# write HOST NODE BYTE: one block of that byte at 1 MiB.
write() {
    head -c 4096 /dev/zero | tr '\0' "$3" > "/run/block.$1.$2"
    timeout 15 dd if="/run/block.$1.$2" of="$(disk "$1" "$2")" bs=4096 seek=256 oflag=direct conv=notrunc status=none
}

# writes HOST, refused HOST: through both nodes.
writes() {
    local node
    for node in a b; do try 20 write "$1" $node "$1" 2> /dev/null; done
}

refused() {
    local node
    for node in a b; do
        ! write "$1" $node x 2> /run/refused || { echo "host $1 writes through node $node"; return 1; }
        grep -q "Invalid exchange" /run/refused || { cat /run/refused; return 1; }
    done
}

# write_somewhere HOST: its byte, through whichever node is there.
write_somewhere() {
    write "$1" a "$1" 2> /dev/null || write "$1" b "$1" 2> /dev/null
}

# reads HOST NODE: the block is what this host has written last; anything else is no reason to try again.
reads() {
    timeout 15 dd if="$(disk "$1" "$2")" of="/run/read.$2" bs=4096 skip=256 count=1 iflag=direct status=none 2> /dev/null || return 1
    head -c 4096 /dev/zero | tr '\0' "$1" | cmp - "/run/read.$2" || exit 1
}

reads_somewhere() {
    reads "$1" a || reads "$1" b
}

# accident STEP: now a node dies; the next change is under way meanwhile, in turn through that node and through the other.
accident() {
    step=$1
    if [ $((step % 4)) -lt 2 ]; then through="a b"; else through="b a"; fi
    touch "$GUEST_SHARE/step-$step"
}

recovered() {
    try 90 test -e "$GUEST_SHARE/back-$step"
    local host node
    for host in 1 2; do
        for node in a b; do try 60 persist $host $node --in --read-keys || { cat /run/persist; return 1; }; done
    done
}

# register HOST OPTION...: on all paths, as clusters do.
register() {
    local host=$1 node
    shift
    for node in a b; do
        through=$node
        out "$host" --register-ignore --param-sark="${KEY[$host]}" "$@"
    done
}

registering() {
    register 1
    keys_are "${KEY[1]}"
    accident 1
    out 2 --register-ignore --param-sark="${KEY[2]}"
    recovered
    register 2
    keys_are "${KEY[1]}" "${KEY[2]}"
}

reserving() {
    accident 2
    out 1 --reserve --param-rk="${KEY[1]}" --prout-type=5
    recovered
    held_by "${KEY[1]}" "Write Exclusive, registrants only"
    writes 1
    writes 2
}

# The other host takes over, from the other node.
preempting() {
    accident 3
    # If the answer was lost it has happened all the same: then its own key holds.
    out 2 --preempt --param-rk="${KEY[2]}" --param-sark="${KEY[1]}" --prout-type=5 || held_by "${KEY[2]}" "Write Exclusive"
    recovered
    held_by "${KEY[2]}" "Write Exclusive, registrants only"
    keys_are "${KEY[2]}"
    refused 1
    writes 2
}

# A host that writes on is cut off for good: what the winner writes stays.
preempting_and_aborting() {
    register 1
    writes 1
    local writers=() node
    for node in a b; do
        (while write 1 $node 1 2> /dev/null; do :; done) &
        writers+=($!)
    done
    sleep 0.5
    accident 4
    out 2 --preempt-abort --param-rk="${KEY[2]}" --param-sark="${KEY[1]}" --prout-type=5 || keys_are "${KEY[2]}"
    try 60 write_somewhere 2
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        try 60 reads_somewhere 2
        sleep 0.2
    done
    wait "${writers[@]}"
    recovered
    reads 2 a
    reads 2 b
    refused 1
}

clearing() {
    accident 5
    out 2 --clear --param-rk="${KEY[2]}" || keys_are
    recovered
    keys_are
    writes 1
    writes 2
}

# fence_scsi: `on` registers and reserves, `off` of the other node's host removes its key and aborts, `unfence` is `on` again.
fencing() {
    register 1
    register 2
    through="a b"
    out 1 --reserve --param-rk="${KEY[1]}" --prout-type=5
    accident 6
    out 1 --preempt-abort --param-rk="${KEY[1]}" --param-sark="${KEY[2]}" --prout-type=5 || keys_are "${KEY[1]}"
    recovered
    keys_are "${KEY[1]}"
    refused 2
    writes 1
    register 2
    writes 2
    through="b a"
    out 1 --clear --param-rk="${KEY[1]}"
}

# What a host has left that does not come back, an operator takes away.
operator() {
    register 2
    through="a b"
    out 2 --reserve --param-rk="${KEY[2]}" --prout-type=3
    try 20 refused 1
    touch "$GUEST_SHARE/operator-wanted"
    try 30 test -e "$GUEST_SHARE/operator-done"
    keys_are
    writes 1
}

dark() {
    touch "$GUEST_SHARE/dark-$1"
    try 120 test -e "$GUEST_SHARE/light-$1"
    local host node
    for host in 1 2; do
        for node in a b; do try 60 persist $host $node --in --read-keys || { cat /run/persist; return 1; }; done
    done
}

with_power_loss() {
    register 1 --param-aptpl
    through="a b"
    out 1 --reserve --param-rk="${KEY[1]}" --prout-type=5
    dark 1
    keys_are "${KEY[1]}"
    held_by "${KEY[1]}" "Write Exclusive, registrants only"
    refused 2
    writes 1
}

without_power_loss() {
    register 1
    dark 2
    keys_are
    writes 2
}

export ISCSI_NOOP_S=1 ISCSI_REPLACEMENT_S=2
must "iscsid" start_iscsid
must "two hosts, each with a path through each node" login_hosts
must "REGISTER on all paths, a node killed meanwhile" registering
must "RESERVE, a node killed meanwhile: held at both nodes" reserving
must "PREEMPT from the other node, a node killed meanwhile: the loser is refused on all paths" preempting
must "PREEMPT AND ABORT of a host that writes, a node killed meanwhile" preempting_and_aborting
must "CLEAR, a node killed meanwhile" clearing
must "fence_scsi: on, off, unfence" fencing
must "an operator takes away what a host has left" operator
must "APTPL: kill -9 of both nodes changes nothing" with_power_loss
must "without APTPL: kill -9 of both nodes frees the volume" without_power_loss
exit "${checks_failed:-0}"
