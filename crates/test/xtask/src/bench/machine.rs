//! The machine and programs of a benchmark.

use std::process::Command;

/// The machine and the programs, one fact for each line; `others` are the programs that are not
/// ours.
pub(super) fn describe(others: &str) -> Vec<String> {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = value_of(&cpuinfo, "model name").unwrap_or("unknown");
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory_kib: u64 = value_of(&meminfo, "MemTotal")
        .and_then(|v| v.split_whitespace().next()?.parse().ok())
        .unwrap_or(0);
    let kernel = first_line("uname", &["-r"]);
    let debian = std::fs::read_to_string("/etc/debian_version").unwrap_or_default();
    vec![
        format!("{processors} processors, {model}; {} GiB of memory", memory_kib.div_ceil(1 << 20)),
        format!("Linux {kernel}, Debian {}", debian.trim()),
        others.to_owned(),
        format!(
            "{}, commit {}",
            first_line("rustc", &["--version"]),
            first_line("git", &["describe", "--always", "--dirty"])
        ),
    ]
}

/// The reference target and the initiators of `./run bench iscsi`.
pub(super) fn iscsi_programs() -> String {
    let qemu = first_line("qemu-img", &["--version"]);
    format!("tgt {}, libiscsi {}, {qemu}", package("tgt"), package("libiscsi-bin"))
}

/// The generators our load generator is compared with.
pub(super) fn fio_programs() -> String {
    first_line("fio", &["--version"])
}

/// The programs of the networks that both protocols use.
pub(super) fn network_programs() -> String {
    "TCP over loopback".to_owned()
}

/// The etcd of a cluster.
pub(super) fn store_programs() -> String {
    first_line("etcd", &["--version"])
}

/// The libraries our parity kernels are compared with, and which of our kernels is used.
pub(super) fn parity_programs(engine: &str) -> String {
    format!("ISA-L {}; our engine: {engine}", package("libisal2"))
}

fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_once(':')?.1.trim())
}

fn first_line(program: &str, arguments: &[&str]) -> String {
    let out = Command::new(program).args(arguments).output();
    let text = out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").to_owned()
}

fn package(name: &str) -> String {
    first_line("dpkg-query", &["-W", "-f", "${Version}", name])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_found_by_their_key() {
        let text = "processor\t: 0\nmodel name\t: A Processor @ 2 GHz\n";
        assert_eq!(value_of(text, "model name"), Some("A Processor @ 2 GHz"));
        assert_eq!(value_of(text, "missing"), None);
    }
}
