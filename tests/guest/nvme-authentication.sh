#!/bin/bash
# A host that has to prove who it is, to both nodes of a volume, through the kernel's own multipath. From the order: PORTALS
# (ADDRESS:PORT of each node), SUBSYSTEM, HOSTNQN, HOSTID, SECRETS (of the host, one for each hash), CONTROLLER (the subsystem's
# secret), MEGABYTES (written and read back).
#
# `secret-N` in the share asks for the Nth secret (from 1) to be asked for, with the subsystem's; `secret-0` for none. The host answers
# by `asks-N`. With `step-N` a node dies, with `back-N` it is back.
. "${0%/*}/lib.sh"

read -ra secrets <<< "$SECRETS"
hashes=("" sha256 sha384 sha512)

# connect OPTION...: to both nodes.
connect() {
    nvme_connect_everywhere --nr-io-queues 2 --keep-alive-tmo 2 "$@"
    try 10 nvme_paths_are live live
    try 10 nvme_disk
}

# secret N: of the host, from now on.
secret() {
    touch "$GUEST_SHARE/secret-$1"
    try 60 test -e "$GUEST_SHARE/asks-$1"
}

# agreed HASH CONTROLLERS: both nodes asked for it, and so many have proved themselves since the kernel's log was cleared. The kernel
# tells of admin queues only.
agreed() {
    dmesg > /run/kernel
    equal "$(grep -c "authenticated with hash hmac($1) dhgroup ffdhe3072" /run/kernel)" 2 "nodes that asked for $1"
    equal "$(grep -c "controller authenticated" /run/kernel)" "$2" "nodes that proved themselves"
}

asked_for() {
    connect
    secret 1
    # Who came by name alone is let go, and does not come back.
    try 20 no_path_lives
    sleep 3
    no_path_lives
    nvme_disconnect_everywhere
}

no_path_lives() {
    local controller
    for controller in /sys/class/nvme/nvme*; do
        ! grep -qsx live "$controller/state" || return 1
    done
}

wrong_secrets() {
    nvme_refused
    nvme_refused --dhchap-secret "${secrets[1]}"
    nvme_refused --dhchap-secret "${secrets[0]}" --dhchap-ctrl-secret "${secrets[1]}"
}

# Each hash, one way and both.
each_hash() {
    local n
    for n in 1 2 3; do
        secret "$n"
        dmesg -c > /run/before
        connect --dhchap-secret "${secrets[n - 1]}"
        agreed "${hashes[n]}" 0
        nvme_disconnect_everywhere
        dmesg -c > /run/before
        connect --dhchap-secret "${secrets[n - 1]}" --dhchap-ctrl-secret "$CONTROLLER"
        agreed "${hashes[n]}" 2
        nvme_disconnect_everywhere
    done
}

# The identifiers of the controllers.
controllers() {
    local controller
    for controller in /sys/class/nvme/nvme*; do
        ! grep -qsx "$SUBSYSTEM" "$controller/subsysnqn" || cat "$controller/cntlid"
    done
}

load() {
    verified_load "$(nvme_disk)" "$1" 4k 4
}

# Nodes die, and the host proves itself to those that come back; in between it gets another secret.
goes_on() {
    local controller before
    connect --dhchap-secret "${secrets[2]}" --dhchap-ctrl-secret "$CONTROLLER"
    load 1 &
    sleep 1
    touch "$GUEST_SHARE/step-1"
    try 90 test -e "$GUEST_SHARE/back-1"
    try 60 nvme_paths_are live live || { nvme list-subsys; return 1; }
    secret 4
    before=$(controllers)
    dmesg -c > /run/before
    for controller in /sys/class/nvme/nvme*; do
        grep -qsx "$SUBSYSTEM" "$controller/subsysnqn" || continue
        echo "${secrets[3]}" > "$controller/dhchap_secret"
    done
    # Within the associations that there are.
    try 20 agreed sha256 2
    equal "$(controllers)" "$before" "controllers"
    nvme_paths_are live live || { nvme list-subsys; return 1; }
    touch "$GUEST_SHARE/step-2"
    try 90 test -e "$GUEST_SHARE/back-2"
    try 60 nvme_paths_are live live || { nvme list-subsys; return 1; }
    wait $!
    load 2
    nvme_disconnect_everywhere
    nvme_refused --dhchap-secret "${secrets[2]}"
}

not_asked_for() {
    secret 0
    connect
    load 3
    nvme_disconnect_everywhere
}

modules nvme-core nvme-tcp crc32c
must "who came by name alone is let go when a secret is asked for" asked_for
check "without a secret, or with a wrong one, no host comes in" wrong_secrets
check "each hash, one way and both, on every queue of both nodes" each_hash
check "nodes die and a secret changes under load: no error" goes_on
check "without being asked, the name will do again" not_asked_for
exit "${checks_failed:-0}"
