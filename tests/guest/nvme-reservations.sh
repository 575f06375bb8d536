#!/bin/bash
# Reservations of one namespace of two nodes, by two NVMe hosts with a path through each node. From the order: PORTALS (ADDRESS:PORT
# of each node), SUBSYSTEM. The kernel must not join the paths (nvme_core.multipath=N): each is a disk of its own.
#
# Each step that changes something makes a file `step-N` in the share when it begins: the host kills a node then, and makes `back-N`
# when all is well again. `dark-1` and `dark-2` ask for the loss of all nodes at once, answered by `light-1` and `light-2`.
. "${0%/*}/lib.sh"

read -r FIRST SECOND <<< "$PORTALS"
KEY=([1]=161 [2]=178)
through="a b"

# portal NODE
portal() {
    if [ "$1" = a ]; then echo "$FIRST"; else echo "$SECOND"; fi
}

connect_hosts() {
    local host node portal
    for host in 1 2; do
        for node in a b; do
            portal=$(portal $node)
            # nvme-cli knows of one host only, and would say that it is connected already.
            echo "transport=tcp,traddr=${portal%:*},trsvcid=${portal##*:},nqn=$SUBSYSTEM,hostnqn=nqn.2026-01.net.example:host-$host,\
hostid=00000000-0000-4000-8000-00000000000$host,keep_alive_tmo=5,reconnect_delay=1,ctrl_loss_tmo=600" > /dev/nvme-fabrics
        done
    done
    for host in 1 2; do
        for node in a b; do try 10 disk $host $node; done
    done
}

# disk HOST NODE: the disk of this host's controller at this node.
disk() {
    local controller portal
    portal=$(portal "$2")
    for controller in /sys/class/nvme/nvme*; do
        grep -qx "nqn.2026-01.net.example:host-$1" "$controller/hostnqn" || continue
        grep -q "traddr=${portal%:*},trsvcid=${portal##*:}\(,\|\$\)" "$controller/address" || continue
        for path in "$controller"/nvme*n*; do
            [ -b "/dev/${path##*/}" ] && echo "/dev/${path##*/}" && return 0
        done
    done
    return 1
}

# reserve HOST COMMAND OPTION...: through whichever node answers, at first the one that the step is about. A conflict is an answer.
reserve() {
    local host=$1 command=$2 end=$((SECONDS + 40)) node disk
    shift 2
    while [ $SECONDS -lt $end ]; do
        for node in $through; do
            disk=$(disk "$host" $node) || continue
            timeout 10 nvme "$command" "$disk" "$@" > /run/reserve 2>&1 && return 0
            if grep -qi "reservation.conflict" /run/reserve; then return 1; fi
        done
        sleep 0.2
    done
    cat /run/reserve
    return 1
}

# once HOST NODE COMMAND OPTION...: how it ends there.
once() {
    local disk
    disk=$(disk "$1" "$2") || return 1
    shift 2
    timeout 10 nvme "$1" "$disk" "${@:2}" > /run/reserve 2>&1
}

# conflicts HOST NODE COMMAND OPTION...: it is refused there, and for that reason.
conflicts() {
    if once "$@"; then
        echo "not refused: $*"
        return 1
    fi
    grep -qi "reservation.conflict" /run/reserve || { cat /run/reserve; return 1; }
}

# report NODE: as one of the hosts reads it there.
report() {
    once 1 "$1" resv-report --eds --numd=255 --output-format=json || return 1
    tr -d ' \n' < /run/reserve
}

# keys_are KEY...: registered, at both nodes.
keys_are() {
    local node
    for node in a b; do
        try 30 report $node > /run/report
        equal "$(grep -o '"rkey":[0-9]*' /run/report | cut -d: -f2 | sort -n | tr '\n' ' ')" "$(printf '%s ' "$@" | sed 's/^ $//')" "keys at node $node"
    done
}

# held_by KEY TYPE: the reservation, at both nodes.
held_by() {
    local node
    for node in a b; do
        try 30 report $node > /run/report
        grep -q "\"rtype\":$2," /run/report || { cat /run/report; return 1; }
        grep -q "\"rcsts\":1[^}]*\"rkey\":$1[,}]" /run/report || { cat /run/report; return 1; }
    done
}

# write HOST NODE BYTE: one block of that byte at 1 MiB.
write() {
    local disk
    disk=$(disk "$1" "$2") || return 1
    head -c 4096 /dev/zero | tr '\0' "$3" > "/run/block.$1.$2"
    timeout 15 dd if="/run/block.$1.$2" of="$disk" bs=4096 seek=256 oflag=direct conv=notrunc status=none
}

# writes HOST, refused HOST: through both nodes.
writes() {
    local node
    for node in a b; do try 30 write "$1" $node "$1" 2> /dev/null; done
}

refused() {
    local node
    for node in a b; do
        ! write "$1" $node x 2> /run/refused || { echo "host $1 writes through node $node"; return 1; }
        grep -q "Invalid exchange" /run/refused || { cat /run/refused; return 1; }
    done
}

# reads HOST NODE: the block is what this host has written last; anything else is no reason to try again.
reads() {
    local disk
    disk=$(disk "$1" "$2") || return 1
    timeout 15 dd if="$disk" of="/run/read.$2" bs=4096 skip=256 count=1 iflag=direct status=none 2> /dev/null || return 1
    head -c 4096 /dev/zero | tr '\0' "$1" | cmp - "/run/read.$2" || exit 1
}

# accident STEP: now a node dies; the next change is under way meanwhile, in turn through that node and through the other.
accident() {
    step=$1
    if [ $((step % 4)) -lt 2 ]; then through="a b"; else through="b a"; fi
    touch "$GUEST_SHARE/step-$step"
}

all_answer() {
    local host node
    for host in 1 2; do
        for node in a b; do
            try 60 once $host $node resv-report --eds --numd=255 || { cat /run/reserve; return 1; }
        done
    done
}

recovered() {
    try 90 test -e "$GUEST_SHARE/back-$step"
    all_answer
}

# register HOST OPTION...: a host is one registrant, whatever paths it has.
register() {
    local host=$1
    shift
    reserve "$host" resv-register --nrkey="${KEY[$host]}" --rrega=0 "$@"
}

registering() {
    register 1
    accident 1
    register 2
    recovered
    keys_are "${KEY[1]}" "${KEY[2]}"
    # Another key is no registration.
    conflicts 1 b resv-register --nrkey=9 --rrega=0
    reserve 1 resv-register --crkey="${KEY[1]}" --nrkey=9 --rrega=2
    keys_are 9 "${KEY[2]}"
    reserve 1 resv-register --iekey --nrkey="${KEY[1]}" --rrega=2
}

reserving() {
    accident 2
    reserve 1 resv-acquire --crkey="${KEY[1]}" --rtype=1 --racqa=0
    recovered
    held_by "${KEY[1]}" 1
    writes 1
    refused 2
    conflicts 2 a resv-acquire --crkey="${KEY[2]}" --rtype=1 --racqa=0
}

# The other host takes over, from the other node.
preempting() {
    accident 3
    # If the answer was lost it has happened all the same: then its own key holds.
    reserve 2 resv-acquire --crkey="${KEY[2]}" --prkey="${KEY[1]}" --rtype=1 --racqa=1 || held_by "${KEY[2]}" 1
    recovered
    keys_are "${KEY[2]}"
    held_by "${KEY[2]}" 1
    refused 1
    writes 2
    # What the loser is told, through a controller that has lived all the time: the other node's.
    nvme resv-notif-log "$(disk 1 b)" --output-format=binary > /run/notices
    equal "$(od -An -tu1 -j8 -N1 /run/notices | tr -d ' ')" 1 "the type of the notice"
}

# A host that writes on is cut off for good: what the winner writes stays.
preempting_and_aborting() {
    reserve 2 resv-release --crkey="${KEY[2]}" --rtype=1 --rrela=0
    register 1
    writes 1
    local writers=() node
    for node in a b; do
        (while write 1 $node 1 2> /dev/null; do :; done) &
        writers+=($!)
    done
    reserve 2 resv-acquire --crkey="${KEY[2]}" --rtype=3 --racqa=0
    sleep 0.5
    kill -0 "${writers[@]}"
    accident 4
    reserve 2 resv-acquire --crkey="${KEY[2]}" --prkey="${KEY[1]}" --rtype=3 --racqa=2 || keys_are "${KEY[2]}"
    try 60 write 2 b 2 2> /dev/null || try 60 write 2 a 2 2> /dev/null
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        try 60 reads 2 a || try 60 reads 2 b
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
    reserve 2 resv-release --crkey="${KEY[2]}" --rrela=1 || keys_are
    recovered
    keys_are
    writes 1
    writes 2
}

dark() {
    touch "$GUEST_SHARE/dark-$1"
    try 120 test -e "$GUEST_SHARE/light-$1"
    all_answer
}

with_power_loss() {
    register 1 --cptpl=3
    reserve 1 resv-acquire --crkey="${KEY[1]}" --rtype=3 --racqa=0
    dark 1
    keys_are "${KEY[1]}"
    held_by "${KEY[1]}" 3
    refused 2
    writes 1
}

without_power_loss() {
    register 1 --cptpl=2
    dark 2
    keys_are
    writes 2
}

modules nvme-core nvme-tcp crc32c
must "two hosts, each with a path through each node" connect_hosts
must "Register and Replace, a node killed meanwhile" registering
must "Acquire, a node killed meanwhile: held at both nodes" reserving
must "Preempt from the other node, a node killed meanwhile: the loser is refused on all paths, and told" preempting
must "Preempt and Abort of a host that writes, a node killed meanwhile" preempting_and_aborting
must "Clear, a node killed meanwhile" clearing
must "persistence through power loss: kill -9 of both nodes changes nothing" with_power_loss
must "without it: kill -9 of both nodes frees the namespace" without_power_loss
exit "${checks_failed:-0}"
