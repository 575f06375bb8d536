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
nvme_program=(newer nvme)

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
    newer keyctl clear %keyring:.nvme
    newer nvme check-tls-key --hostnqn "$HOSTNQN" --subsysnqn "$SUBSYSTEM" --keydata "${keys[$1 - 1]}" --identity "$2" --insert
    newer keyctl show %keyring:.nvme
}

connect() {
    nvme_connect_everywhere --nr-io-queues 2 --keep-alive-tmo 5 "$@" || { cat /run/tlshd.log; return 1; }
    try 10 nvme_paths_are live live
    try 10 nvme_disk
}

# protected: every controller has a key.
protected() {
    local controller
    for controller in /sys/class/nvme/nvme*; do
        grep -qsx "$SUBSYSTEM" "$controller/subsysnqn" || continue
        cat "$controller/tls_key" || return 1
        grep -q '[1-9a-f]' "$controller/tls_key" || return 1
    done
}

demanded() {
    touch "$GUEST_SHARE/key-1"
    try 60 test -e "$GUEST_SHARE/wants-1"
    nvme_refused
    key 2 1
    nvme_refused --tls
}

# Both versions of a key's name.
each_name() {
    local identity
    for identity in 0 1; do
        key 1 "$identity"
        connect --tls
        protected
        verified_load "$(nvme_disk)" "1$identity" 64k 8
        nvme_disconnect_everywhere
    done
}

goes_on() {
    connect --tls
    verified_load "$(nvme_disk)" 3 4k 8 &
    sleep 1
    touch "$GUEST_SHARE/step-1"
    try 90 test -e "$GUEST_SHARE/back-1"
    try 60 nvme_paths_are live live || { nvme list-subsys; return 1; }
    wait $!
    protected
    nvme_disconnect_everywhere
}

modules nvme-core nvme-tcp crc32c
must "the kernel's handshakes have their daemon" start_tlshd
check "without TLS, or by a wrong key, no host comes in" demanded
check "each name of a key, to both nodes" each_name
check "a node dies under load, and its host comes by TLS again" goes_on
exit "${checks_failed:-0}"
