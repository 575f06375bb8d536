//! Examples of every command, for its help and its manual page.

use clap::Command;

/// A description and a command line.
pub(crate) type Example = (&'static str, &'static str);

/// Examples, by the words of the command.
const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "node",
        &[
            ("Run a node with the usual configuration", "windrose node"),
            (
                "Only check a configuration",
                "windrose node --check --config /etc/windrose/windrose.toml",
            ),
        ],
    ),
    ("node drain", &[("Before the machine of node b is switched off", "windrose node drain b")]),
    ("node resume", &[("When it is back", "windrose node resume b")]),
    (
        "node accept-data-dir",
        &[(
            "After the data directory was restored, before the node starts",
            "windrose node accept-data-dir",
        )],
    ),
    ("cluster init", &[("At the first node; the others join", "windrose cluster init")]),
    (
        "cluster token",
        &[("At a node of the cluster, for one that joins", "windrose cluster token > token")],
    ),
    (
        "cluster token create",
        &[
            (
                "For three nodes, within a day",
                "windrose cluster token create --uses 3 --expires 1d > token",
            ),
            ("For a witness", "windrose cluster token create --witness > token"),
            (
                "For any number of nodes, each of which waits for approval",
                "windrose cluster token create --unlimited --require-approval > token",
            ),
        ],
    ),
    (
        "cluster rotate",
        &[("After a node was stolen and removed from the cluster", "windrose cluster rotate")],
    ),
    ("cluster token list", &[("Which tokens are still valid", "windrose cluster token list")]),
    ("cluster token revoke", &[("One that was leaked", "windrose cluster token revoke 1a2b3c4d")]),
    (
        "cluster joins",
        &[("Which nodes have joined or wait for approval", "windrose cluster joins")],
    ),
    ("cluster approve", &[("Admit a node that waits", "windrose cluster approve 1a2b3c4d")]),
    ("cluster refuse", &[("Reject a node that waits", "windrose cluster refuse 1a2b3c4d")]),
    (
        "cluster join",
        &[("At the node that joins", "windrose cluster join --cluster-token-file token")],
    ),
    (
        "cluster witness",
        &[(
            "At a third machine without data",
            "windrose cluster witness --cluster-token-file token",
        )],
    ),
    (
        "cluster nodes",
        &[
            ("The nodes, and which of them run", "windrose cluster nodes"),
            ("The same as JSON", "windrose cluster nodes --json"),
        ],
    ),
    (
        "cluster recover",
        &[
            ("Only show what would be done", "windrose cluster recover --dry-run"),
            ("Without node c, whose disks are lost", "windrose cluster recover --without c"),
        ],
    ),
    (
        "cluster leave",
        &[
            ("At the node that leaves, after its replicas were moved", "windrose cluster leave"),
            ("A node that is lost for good", "windrose cluster leave --node b --force"),
        ],
    ),
    (
        "volume create",
        &[
            (
                "On this node",
                "windrose volume create web --size 100G --allow iqn.1993-08.org.debian:01:abc",
            ),
            (
                "With replicas on two nodes",
                "windrose volume create web --size 100G --replicas 2 --allow any",
            ),
            ("In a disk pool", "windrose volume create vm1 --size 20G --pool tank"),
            ("Three at once", "windrose volume create web-1 web-2 web-3 --size 20G --replicas 2"),
        ],
    ),
    ("volume list", &[("All volumes", "windrose volume list")]),
    (
        "volume show",
        &[
            ("Its state, its replicas and how to connect", "windrose volume show web"),
            ("The same as JSON", "windrose volume show web --json"),
        ],
    ),
    ("volume grow", &[("To 200 GiB, while it is in use", "windrose volume grow web --size 200G")]),
    (
        "volume mirror add",
        &[
            ("A second replica, on the node with the most space", "windrose volume mirror add web"),
            ("On node c, in its pool tank", "windrose volume mirror add web --on c --pool tank"),
        ],
    ),
    (
        "volume mirror remove",
        &[("The replica on node b", "windrose volume mirror remove web --on b")],
    ),
    (
        "volume mirror replace",
        &[
            (
                "Move a replica from node b to node c",
                "windrose volume mirror replace web --on b --with c",
            ),
            (
                "A lost replica, with a new one in its place",
                "windrose volume mirror replace web --on b",
            ),
        ],
    ),
    (
        "volume mirror set",
        &[
            ("Two replicas", "windrose volume mirror set web --replicas 2"),
            ("Be content with the remaining one", "windrose volume mirror set web --replicas 1"),
        ],
    ),
    (
        "volume mirror verify",
        &[
            ("Check that all replicas are equal", "windrose volume mirror verify web"),
            (
                "Overwrite differences with the data of node a",
                "windrose volume mirror verify web --repair --source a",
            ),
        ],
    ),
    (
        "volume switch-primary",
        &[("Make node b the primary", "windrose volume switch-primary web --to b")],
    ),
    (
        "volume force-primary",
        &[(
            "Use the replica here, and give up newer data of others",
            "windrose volume force-primary web",
        )],
    ),
    (
        "volume take-over",
        &[("From a node that will never use it again", "windrose volume take-over web")],
    ),
    (
        "volume reservations",
        &[
            ("Which hosts have reserved it", "windrose volume reservations web"),
            ("Remove those of dead hosts", "windrose volume reservations web --clear"),
        ],
    ),
    ("volume orphans", &[("Images that belong to no volume", "windrose volume orphans")]),
    (
        "volume adopt",
        &[
            (
                "Show what would be done with an image",
                "windrose volume adopt /var/lib/windrose/volumes/web.img --dry-run",
            ),
            ("Adopt it under another name", "windrose volume adopt tank/web --name web2"),
        ],
    ),
    (
        "volume discard",
        &[("Erase an image", "windrose volume discard /var/lib/windrose/volumes/web.img")],
    ),
    (
        "volume delete",
        &[
            ("Asks for its name first", "windrose volume delete web"),
            ("In a script", "windrose volume delete web --yes"),
        ],
    ),
    (
        "volume export",
        &[
            ("By iSCSI and NVMe/TCP", "windrose volume export web --protocols iscsi,nvme"),
            ("Not at all", "windrose volume export web --protocols none"),
        ],
    ),
    (
        "volume target",
        &[
            ("As LUN 1 of the target of volume a", "windrose volume target b --join a --lun 1"),
            ("With its own target again", "windrose volume target b --own"),
        ],
    ),
    (
        "volume allow",
        &[
            ("One initiator", "windrose volume allow web iqn.1993-08.org.debian:01:abc"),
            ("All initiators", "windrose volume allow web any"),
        ],
    ),
    (
        "volume deny",
        &[(
            "Revoke the access of an initiator",
            "windrose volume deny web iqn.1993-08.org.debian:01:abc",
        )],
    ),
    (
        "volume chap",
        &[
            ("Require a secret", "windrose volume chap web backup:/etc/windrose/web.secret"),
            ("Require none", "windrose volume chap web --off"),
        ],
    ),
    (
        "volume dhchap",
        &[(
            "Require authentication from a host",
            "windrose volume dhchap web --host nqn.2014-08.org.nvmexpress:h --secret h.secret",
        )],
    ),
    (
        "volume tls",
        &[(
            "Require TLS from a host",
            "windrose volume tls web --host nqn.2014-08.org.nvmexpress:h --key h.key",
        )],
    ),
    (
        "pool create",
        &[
            (
                "Three disks, one of which may fail",
                "windrose pool create tank --raid 5 /dev/disk/by-id/ata-A /dev/disk/by-id/ata-B /dev/disk/by-id/ata-C",
            ),
            (
                "Two copies on two disks, a spare, and checksums",
                "windrose pool create fast --raid 1 --checksums --spare /dev/sdc /dev/sda /dev/sdb",
            ),
        ],
    ),
    ("pool list", &[("All pools of this node", "windrose pool list")]),
    ("pool show", &[("Its disks, and what to do if they have failed", "windrose pool show tank")]),
    (
        "pool import",
        &[
            ("Pools that this node does not know", "windrose pool import"),
            ("Import one, under another name", "windrose pool import tank --as tank2"),
        ],
    ),
    (
        "pool add",
        &[
            ("One more disk", "windrose pool add tank /dev/disk/by-id/ata-D"),
            ("As a spare", "windrose pool add tank --spare /dev/disk/by-id/ata-D"),
        ],
    ),
    (
        "pool remove",
        &[
            (
                "Move the data of a disk to the others, and remove it",
                "windrose pool remove tank WD-1234",
            ),
            ("Keep it after all", "windrose pool remove tank WD-1234 --cancel"),
        ],
    ),
    (
        "pool replace",
        &[(
            "A disk that has failed",
            "windrose pool replace tank WD-1234 --with /dev/disk/by-id/ata-D",
        )],
    ),
    ("pool clear", &[("Reset the error counters of a disk", "windrose pool clear tank WD-1234")]),
    ("pool scrub", &[("Read all of it, and repair damaged blocks", "windrose pool scrub tank")]),
    (
        "pool open",
        &[
            ("Without a disk that is lost for good", "windrose pool open tank --without WD-1234"),
            ("From a node that is lost", "windrose pool open tank --take-over"),
        ],
    ),
    ("pool delete", &[("When it has no volumes left", "windrose pool delete tank")]),
    (
        "attach",
        &[
            (
                "A disk of a virtual machine",
                "windrose attach web --vhost-user /run/windrose/web.sock",
            ),
            ("A block device of this machine", "windrose attach web --ublk"),
            ("For qemu-img and backup programs", "windrose attach web --nbd /run/windrose/web.nbd"),
        ],
    ),
    (
        "bench",
        &[
            (
                "Random reads of a volume by NVMe/TCP",
                "windrose bench nvme://10.0.0.1/nqn.2026-01.com.example:disk --rw randread --bs 4k --iodepth 32 --runtime 30 --time_based",
            ),
            (
                "Reads and writes of a file, verified",
                "windrose bench /mnt/x/file --size 1g --rw randrw --rwmixread 70 --numjobs 4 --offset_increment 1g --verify=crc32c",
            ),
            ("A job file of fio", "windrose bench --job-file database.fio --json"),
        ],
    ),
    (
        "status",
        &[
            ("Is the data safe? The exit code tells as well", "windrose status"),
            (
                "Of another node, by TCP",
                "windrose status --api https://10.0.0.2:7443 --token-file token --ca-cert ca.pem",
            ),
        ],
    ),
    ("sessions", &[("Which initiators use which volumes", "windrose sessions")]),
    (
        "completions",
        &[(
            "For bash, for all users",
            "windrose completions bash > /etc/bash_completion.d/windrose",
        )],
    ),
    ("man", &[("Into the system's directory", "windrose man /usr/local/share/man/man1")]),
];

/// The examples of the command with these words.
pub(crate) fn examples_for(words: &str) -> Option<&'static [Example]> {
    EXAMPLES.iter().find(|(of, _)| *of == words).map(|(_, examples)| *examples)
}

/// The first example of a command, or of its first subcommand that has one.
pub(crate) fn first_example(words: &str) -> Option<Example> {
    let is_below = |of: &str| {
        of.strip_prefix(words).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    };
    EXAMPLES.iter().find(|(of, _)| is_below(of)).and_then(|(_, examples)| examples.first().copied())
}

/// Adds examples to the help of a command and its subcommands; `words` is the command's path.
pub(crate) fn add_to_help(command: Command, words: &str) -> Command {
    let names: Vec<String> =
        command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    let command = names.iter().fold(command, |command, name| {
        let longer = format!("{words} {name}");
        command.mut_subcommand(name, |sub| add_to_help(sub, longer.trim_start()))
    });
    let Some(examples) = examples_for(words) else { return command };
    let lines = examples.iter().map(|(what, line)| format!("\n  # {what}\n  {line}"));
    let mut text = format!("Examples:{}", lines.collect::<String>());
    if let Some(after) = command.get_after_help() {
        text.push_str(&format!("\n\n{after}"));
    }
    command.after_help(text)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::cli::Cli;

    /// Collects the paths of all commands that do something, with or without subcommands.
    fn leaves(command: &Command, words: &str, all: &mut Vec<String>) {
        for sub in command.get_subcommands() {
            let longer = format!("{words} {}", sub.get_name());
            leaves(sub, longer.trim_start(), all);
        }
        if !command.is_arg_required_else_help_set() || !command.has_subcommands() {
            all.push(words.to_owned());
        }
    }

    #[test]
    fn every_command_has_examples_in_its_help() {
        let mut all = Vec::new();
        leaves(&Cli::command(), "", &mut all);
        assert!(all.len() > 40, "{all:?}");
        for words in &all {
            assert!(
                examples_for(words).is_some_and(|e| !e.is_empty()),
                "no example of windrose {words}"
            );
        }
        for (words, _) in EXAMPLES {
            assert!(all.iter().any(|known| known == words), "there is no windrose {words}");
        }
        let help = add_to_help(Cli::command(), "");
        let of_grow = help.find_subcommand("volume").and_then(|v| v.find_subcommand("grow"));
        let text = of_grow.unwrap().clone().render_help().to_string();
        assert!(text.ends_with("  windrose volume grow web --size 200G\n"), "{text}");
    }

    #[test]
    fn every_example_is_a_good_command_line_of_its_command() {
        for (words, examples) in EXAMPLES {
            for (_, line) in *examples {
                let line = line.split(" > ").next().unwrap();
                let parsed = Cli::command().try_get_matches_from(line.split(' '));
                let matches = parsed.unwrap_or_else(|e| panic!("{line}: {e}"));
                let (mut at, mut found) = (&matches, Vec::new());
                while let Some((name, below)) = at.subcommand() {
                    found.push(name);
                    at = below;
                }
                assert_eq!(found.join(" "), *words, "{line}");
                Cli::from_arg_matches(&matches).unwrap_or_else(|e| panic!("{line}: {e}"));
            }
        }
    }
}
