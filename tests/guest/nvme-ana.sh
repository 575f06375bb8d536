#!/bin/bash
# The kernel's own NVMe multipath over a volume of two nodes, under verified load, while a node is killed, cut off, isolated and drained,
# and comes back: what the kernel knows of each path. From the order: PORTALS (ADDRESS:PORT of each node), SUBSYSTEM, HOSTNQN, HOSTID,
# TROUBLES (their names; `under_trouble` in lib.sh says what is told of them, by the sign NAME-nvme), RATE (writes a second).
. "${0%/*}/lib.sh"

# controller NODE: the only one that the kernel has at this node.
controller() {
    local portals portal path found=()
    read -ra portals <<< "$PORTALS"
    portal=${portals[$1]}
    for path in /sys/class/nvme/nvme*; do
        grep -qsE "traddr=${portal%:*},trsvcid=${portal##*:}(,|\$)" "$path/address" && found+=("$path")
    done
    [ ${#found[@]} = 1 ] && echo "${found[0]}"
}

# path NODE: the namespace as this node has it.
path() {
    ls -d "$(controller "$1")"/nvme*c*n*
}

# is NODE STATE [ACCESS]: its controller is in this state, and the namespace in this access state there. Of a node that cannot be reached
# the kernel knows what it was told last.
is() {
    [ "$(cat "$(controller "$1")/state")" = "$2" ] || return 1
    [ -z "${3:-}" ] || [ "$(cat "$(path "$1")/ana_state")" = "$3" ]
}

shown() {
    nvme list-subsys
    grep . /sys/class/nvme/nvme*/nvme*c*n*/ana_state
    return 1
}

# A node that cannot be reached is tried again and again; one that can says itself that it is not to be used.
node_is_gone() {
    case $trouble in
    killed | cut-off) try 20 is "$1" connecting ;;
    *) try 20 is "$1" live inaccessible ;;
    esac || shown
    try 20 is $((1 - $1)) live optimized || shown
}

nodes_are_back() {
    local node
    for node in 0 1; do try 60 is $node live optimized || shown; done
    nvme_paths_are live live || shown
    try 20 used "$(basename "$(path 0)")" "$(basename "$(path 1)")" || shown
}

connect() {
    local node policy
    nvme_connect_everywhere --keep-alive-tmo 2
    try 10 nvme_disk
    for node in 0 1; do try 10 is $node live optimized || shown; done
    for policy in /sys/class/nvme-subsystem/*/iopolicy; do echo round-robin > "$policy"; done
}

# The kernel tells of each command that failed for good, of queues that were there already, of namespaces that were not as they were.
kernel_is_content() {
    ! dmesg | grep -i nvme | grep -iE 'I/O error|duplicate|critical|identifiers'
}

modules nvme-core nvme-tcp crc32c
must "two paths, both optimized" connect
for trouble in $TROUBLES; do
    must "$trouble: the kernel sees it, and the end of it; no error, no long pause, no connection left" \
        under_trouble "$trouble-nvme" "$(nvme_disk)" node_is_gone nodes_are_back
done
check "the kernel tells of no error" kernel_is_content
nvme_disconnect_everywhere
exit "${checks_failed:-0}"
