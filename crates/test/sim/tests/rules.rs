//! Replays must depend on nothing but the seed: this forbids sources of nondeterminism by name.

use std::fs;
use std::path::{Path, PathBuf};

/// Crates whose code runs in simulated worlds.
const SIMULATED: &[&str] = &[
    "base/block",
    "protocol/frame",
    "serve/initiator",
    "protocol/iscsi",
    "storage/checksum",
    "storage/disk",
    "storage/geometry",
    "storage/image",
    "storage/intent-log",
    "storage/mirror",
    "storage/pool",
    "storage/raid",
    "protocol/nbd",
    "protocol/nvme",
    "protocol/reservation",
    "protocol/scsi",
    "test/sim",
    "serve/target",
    "serve/volume",
    "base/wire",
];

/// Files of other crates that run there, too.
const SIMULATED_FILES: &[&str] =
    &["cluster/cluster/src/incarnations.rs", "cluster/cluster/src/store/memory.rs"];

/// Forbidden strings, and why.
const BANNED: &[(&str, &str)] = &[
    ("collections::HashMap", "its order differs from run to run: FxHashMap or BTreeMap"),
    ("collections::HashSet", "its order differs from run to run: FxHashSet or BTreeSet"),
    ("RandomState", "differs from run to run"),
    ("DefaultHashBuilder", "differs from run to run"),
    ("getrandom", "ask the core: rt::Core::random_u64"),
    ("rand::", "ask the core: rt::Core::random_u64"),
    ("Uuid::new_v4", "ask the core: rt::Core::random_u64"),
    ("watch::channel", "wakes several receivers in an order of its own"),
    ("futures_util::select!", "draws the order of its branches: select_biased"),
    ("std::net::Tcp", "ask the core: rt::Core::listen, dial"),
    ("spawn_blocking", "threads belong to rt"),
];

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    for entry in entries {
        let path = entry.expect("a directory that was just opened").path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

#[test]
fn simulated_code_depends_only_on_the_seed() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    for name in SIMULATED {
        sources(&crates.join(name).join("src"), &mut files);
    }
    sources(&crates.join("base/rt/src/sim"), &mut files);
    files.extend(SIMULATED_FILES.iter().map(|file| crates.join(file)));
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            if line.trim_start().starts_with("//") {
                continue;
            }
            let place = format!("{}:{}", file.display(), i + 1);
            for (word, why) in BANNED {
                if line.contains(word) {
                    found.push(format!("{place}: {word}: {why}"));
                }
            }
            let selects = line.contains("tokio::select! {") || line.contains(" select! {");
            if selects && lines.get(i + 1).is_none_or(|next| next.trim() != "biased;") {
                found.push(format!("{place}: select! without `biased;` draws its order"));
            }
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}
