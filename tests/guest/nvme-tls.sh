#!/bin/bash
# A host that comes by TLS, to both nodes of a volume. From the order: PORTALS (ADDRESS:PORT of each node), SUBSYSTEM, HOSTNQN, HOSTID, KEYS
# (of the host and the subsystem: the one that is demanded, and a wrong one), MEGABYTES (written and read back), TOOLS (the root of a
# newer Debian: its nvme-cli, and the daemon that shakes hands for the kernel).
#
# `key-1` in the share asks for the first key to be demanded. The host answers by `wants-1`. With `step-1` a node dies, with `back-1` it
# is back.
. "${0%/*}/lib.sh"

read -ra keys <<< "$KEYS"

newer() {
    chroot "$TOOLS" "$@"
}

start_tlshd() {
    local m
    for m in proc sys dev; do mount --bind "/$m" "$TOOLS/$m"; done
    # Keys of NVMe are in a keyring of the kernel's.
    sed -i 's/^#keyrings=.*/keyrings=.nvme/' "$TOOLS/etc/tlshd.conf"
    newer tlshd --stderr > /run/tlshd.log 2>&1 &
    sleep 1
    kill -0 $!
}

# key N IDENTITY: the host has it, by this version of its name.
key() {
    keyctl clear %keyring:.nvme 2> /dev/null || newer keyctl clear %keyring:.nvme
    newer nvme check-tls-key --hostnqn "$HOSTNQN" --subsysnqn "$SUBSYSTEM" --keydata "${keys[$1 - 1]}" --identity "$2" --insert
    newer keyctl show %keyring:.nvme
}

connect_to() {
    local portal=$1
    shift
    newer nvme connect -t tcp -a "${portal%:*}" -s "${portal#*:}" -n "$SUBSYSTEM" --hostnqn "$HOSTNQN" --hostid "$HOSTID" \
        --nr-io-queues 2 --keep-alive-tmo 5 --reconnect-delay 1 --ctrl-loss-tmo -1 "$@"
}

connect() {
    local portal
    for portal in $PORTALS; do
        connect_to "$portal" "$@" || { cat /run/tlshd.log; return 1; }
    done
    try 10 paths_are live live
    try 10 nvme_disk
}

disconnect() {
    nvme disconnect -n "$SUBSYSTEM"
    try 10 paths_are
}

# paths_are STATE...: of the controllers that there are.
paths_are() {
    local controller found=()
    for controller in /sys/class/nvme/nvme*; do
        grep -qsx "$SUBSYSTEM" "$controller/subsysnqn" && found+=("$(cat "$controller/state")")
    done
    [ "${found[*]}" = "$*" ]
}

# protected: every controller has a key.
protected() {
    local controller
    for controller in /sys/class/nvme/nvme*; do
        grep -qsx "$SUBSYSTEM" "$controller/subsysnqn" || continue
        cat "$controller/tls_key"
        [ -s "$controller/tls_key" ] || return 1
    done
}

load() {
    fio --name=load --filename="$(nvme_disk)" --size="${MEGABYTES}M" --rw=randwrite --bs="$2" --iodepth=8 --rate_iops=300 \
        --randseed="$1" --ioengine=libaio --direct=1 --verify=crc32c --verify_pattern="$1" --do_verify=1 --verify_fatal=1 \
        > "/run/fio.$1" 2>&1 || { cat "/run/fio.$1"; return 1; }
}

refused() {
    local portal
    for portal in $PORTALS; do
        ! connect_to "$portal" "$@" || return 1
    done
    paths_are
}

demanded() {
    touch "$GUEST_SHARE/key-1"
    try 60 test -e "$GUEST_SHARE/wants-1"
    refused
    key 2 1
    refused --tls
}

# Both versions of a key's name.
each_name() {
    local identity
    for identity in 0 1; do
        key 1 "$identity"
        connect --tls
        protected
        load "1$identity" 64k
        disconnect
    done
}

goes_on() {
    connect --tls
    load 3 4k &
    sleep 1
    touch "$GUEST_SHARE/step-1"
    try 90 test -e "$GUEST_SHARE/back-1"
    try 60 paths_are live live || { nvme list-subsys; return 1; }
    wait $!
    protected
    disconnect
}

modules nvme-core nvme-tcp crc32c
must "the kernel's handshakes have their daemon" start_tlshd
check "without TLS, or by a wrong key, nobody comes in" demanded
check "each name of a key, to both nodes" each_name
check "a node dies under load, and its host comes by TLS again" goes_on
exit "${checks_failed:-0}"
