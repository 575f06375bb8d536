//! Every number that the protocol crates put on a wire, against numbers from outside this project.
//!
//! A test that uses the constant it tests agrees with every mistake in it. The tables beside this
//! file carry the numbers of public headers and of the standards, with their names there. Every
//! constant, every discriminant and every number of a match arm of the crates is looked up in them:
//! a missing one fails, so a new constant needs an independent number.
//!
//! A row is `file item number source name`, or `file item = reason` for what no standard fixes.

mod scan;

use std::collections::BTreeMap;
use std::path::Path;

use scan::{Found, found_in};

const TABLES: [(&str, &str); 5] = [
    ("nvme", include_str!("protocol_constants/nvme.txt")),
    ("scsi", include_str!("protocol_constants/scsi.txt")),
    ("iscsi", include_str!("protocol_constants/iscsi.txt")),
    ("nbd", include_str!("protocol_constants/nbd.txt")),
    ("reservation", include_str!("protocol_constants/reservation.txt")),
];

/// The entries of a table for the items of one name in one file.
#[derive(Default)]
struct Expected {
    /// Numbers, as the standard has them.
    numbers: Vec<String>,
    /// No standard fixes it.
    is_ours: bool,
}

type Key = (String, String);

fn table_of(text: &'static str) -> BTreeMap<Key, Expected> {
    let mut table: BTreeMap<Key, Expected> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert!(words.len() >= 4, "a row is file, item, number (or =), source: {line}");
        let entry = table.entry((words[0].to_owned(), words[1].to_owned())).or_default();
        match words[2] {
            "=" => entry.is_ours = true,
            number => {
                assert!(words.len() >= 5, "a number needs its source and its name there: {line}");
                entry.numbers.push(number.to_owned());
            }
        }
    }
    table
}

/// The errors in `found`, by the table of its crate.
fn deviations(found: &[Found], table: &BTreeMap<Key, Expected>) -> Vec<String> {
    let mut wrong = Vec::new();
    for item in found {
        let key = (item.file.clone(), item.name.clone());
        let Found { file, name, value } = item;
        match table.get(&key) {
            None => wrong.push(format!("not in the table: {file} {name} {value}")),
            Some(e) if e.is_ours || e.numbers.contains(value) => {}
            Some(_) => wrong.push(format!("{file} {name} is {value}: not what the table has")),
        }
    }
    for ((file, name), expected) in table {
        let mut same = found.iter().filter(|item| item.file == *file && item.name == *name);
        if same.clone().next().is_none() {
            wrong.push(format!("in the table, but not in the crate: {file} {name}"));
        } else if let Some(number) =
            expected.numbers.iter().find(|n| !same.clone().any(|item| item.value == **n))
        {
            let value = same.next().map_or("", |item| &item.value);
            wrong.push(format!("{file} {name} is {value}, has to be {number}"));
        }
    }
    wrong
}

fn found_in_crate(name: &str) -> Vec<Found> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../protocol").join(name).join("src");
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the crate's sources are there") {
            let path = entry.expect("a file has a name").path();
            let file =
                path.strip_prefix(&root).expect("it is below").to_string_lossy().into_owned();
            // What helps tests, and tests.
            if file.starts_with("testing") || file.ends_with("tests.rs") {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else {
                let text = std::fs::read_to_string(&path).expect("sources are text");
                found.extend(found_in(&file, &text));
            }
        }
    }
    assert!(found.len() > 10, "{name}: {} constants found", found.len());
    found.sort();
    found
}

#[test]
fn every_constant_of_the_protocols_agrees_with_an_independent_table() {
    let mut wrong = Vec::new();
    for (name, text) in TABLES {
        let found = found_in_crate(name);
        wrong.extend(deviations(&found, &table_of(text)).iter().map(|w| format!("{name}: {w}")));
    }
    assert!(wrong.is_empty(), "{} deviations:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn wrong_new_and_missing_constants_are_reported() {
    let table = table_of("a.rs Status::EXPIRED 0x19 libnvme NVME_SC\na.rs GONE 0x1 libnvme X\n");
    let text = "impl Status { pub const EXPIRED: Self = generic(0x18); } const NEW: u8 = 1 << 3;";
    let wrong = deviations(&found_in("a.rs", text), &table);
    assert_eq!(
        wrong,
        [
            "a.rs Status::EXPIRED is 0x18: not what the table has",
            "not in the table: a.rs NEW 0x8",
            "in the table, but not in the crate: a.rs GONE",
            "a.rs Status::EXPIRED is 0x18, has to be 0x19",
        ]
    );
}
